"""The mixture-of-experts part of a ``TransformerConfig`` for a Hugging Face configuration."""

from __future__ import annotations

from typing import Any


def experts_of(hf: dict[str, Any]) -> int | None:
    """Routed experts per layer, None for a dense model. Writers differ in the name."""
    return hf.get("num_experts") or hf.get("num_local_experts") or hf.get("n_routed_experts")


def moe_options(hf: dict[str, Any]) -> dict[str, Any]:
    """Megatron's options for the routed and shared experts; empty for a dense model."""
    experts = experts_of(hf)
    if not experts:
        return {}
    return {
        "num_moe_experts": experts,
        "moe_router_topk": hf["num_experts_per_tok"],
        # Mixtral's experts are as wide as its configuration says for an MLP.
        "moe_ffn_hidden_size": hf.get("moe_intermediate_size") or hf["intermediate_size"],
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
        "moe_layer_freq": _sparse_layers(hf),
        **_router_options(hf),
        **_shared_options(hf),
    }


def _sparse_layers(hf: dict[str, Any]) -> list[int]:
    period, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    first = hf.get("first_k_dense_replace", 0)
    layers = range(hf["num_hidden_layers"])
    return [int(layer >= first and layer not in dense and (layer + 1) % period == 0) for layer in layers]


def _router_options(hf: dict[str, Any]) -> dict[str, Any]:
    scores = hf.get("scoring_func") or hf.get("score_function")
    if scores == "sigmoid" or hf["architectures"][0] == "Glm4MoeForCausalLM":
        options: dict[str, Any] = {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
        }
    else:
        # Softmax over all experts and then the largest, unless the chosen ones are normalised again. Some always are,
        # and their configurations do not say so.
        always = hf["architectures"][0].startswith(("Mixtral", "Qwen3_5", "Qwen3VL"))
        options = {"moe_router_pre_softmax": not (always or hf.get("norm_topk_prob", False))}
    groups = hf.get("n_group") or 1
    if groups > 1:
        options |= {"moe_router_num_groups": groups, "moe_router_group_topk": hf["topk_group"]}
    if hf.get("routed_scaling_factor"):
        options["moe_router_topk_scaling_factor"] = hf["routed_scaling_factor"]
    return options


def _shared_options(hf: dict[str, Any]) -> dict[str, Any]:
    gated = hf.get("shared_expert_intermediate_size")
    if gated:
        return {"moe_shared_expert_intermediate_size": gated, "moe_shared_expert_gate": True}
    count = hf.get("n_shared_experts") or hf.get("num_shared_experts")
    if not count:
        return {}
    width = hf.get("moe_shared_expert_intermediate_size") or hf["moe_intermediate_size"]
    return {"moe_shared_expert_intermediate_size": count * width}
