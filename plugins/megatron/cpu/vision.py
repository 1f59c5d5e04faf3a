"""A vision tower beside a language model, for its weights only.

Megatron-Core has no such model. Megatron-Bridge builds one for Qwen3-VL and Qwen3.5 from Megatron's layers; this one
has the same modules and names, on CPUs, and computes the text part only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def add_vision(language: Any, hf: dict[str, Any], *, tp: int, here: bool) -> Any:
    """``language`` as the part of a model with a vision tower.

    :param here: whether this chunk holds the tower; pipelines keep it in the first one
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    vision = hf["vision_config"]
    dtype = language.config.params_dtype

    def config_of(**options: Any) -> Any:
        return TransformerConfig(
            num_layers=vision["depth"],
            hidden_size=vision["hidden_size"],
            num_attention_heads=vision["num_heads"],
            ffn_hidden_size=vision["intermediate_size"],
            normalization="LayerNorm",
            activation_func=F.gelu,
            add_bias_linear=True,
            use_cpu_initialization=True,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            tensor_model_parallel_size=tp,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            **options,
        )

    class Merger(MegatronModule):  # type: ignore[misc]
        def __init__(self, config: Any, norm: int) -> None:
            super().__init__(config)
            wide = vision["hidden_size"] * vision["spatial_merge_size"] ** 2
            self.patch_norm = torch.nn.LayerNorm(norm)
            self.linear_fc1 = ColumnParallelLinear(wide, wide, config=config, init_method=config.init_method)
            self.linear_fc2 = RowParallelLinear(
                wide,
                vision["out_hidden_size"],
                config=config,
                init_method=config.init_method,
                bias=True,
                input_is_parallel=True,
                skip_bias_add=False,
            )

    class Tower(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            config = config_of()
            super().__init__(config)
            size, wide = vision["hidden_size"], vision["hidden_size"] * vision["spatial_merge_size"] ** 2
            kernel = (vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
            self.patch_embed = torch.nn.Module()
            self.patch_embed.proj = torch.nn.Conv3d(vision["in_channels"], size, kernel, kernel)
            self.pos_embed = torch.nn.Embedding(vision["num_position_embeddings"], size)
            self.decoder = TransformerBlock(
                config,
                get_gpt_layer_local_spec(normalization="LayerNorm"),
                post_layer_norm=False,
                post_process=False,
            )
            deep = vision.get("deepstack_visual_indexes") or ()
            if deep:
                self.decoder.deepstack_merger_list = MegatronModule(config)
                for number in range(len(deep)):
                    self.decoder.deepstack_merger_list.add_module(str(number), Merger(config, wide))
            self.merger = Merger(config, size)

    class VisionLanguageModel(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(language.config)
            self.language_model = language
            if here:
                self.vision_model = Tower()

        def set_input_tensor(self, tensor: Any) -> None:
            self.language_model.set_input_tensor(tensor)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.language_model(*args, **kwargs)

    return VisionLanguageModel()
