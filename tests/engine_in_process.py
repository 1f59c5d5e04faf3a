"""An ``sglang.Engine`` and a Megatron trainer in one process, which pushes into both it and a server. Run as a script:
``CHECKPOINT SERVER_URL VERSION``; prints one JSON line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.modules["flash_mla"] = None  # type: ignore[assignment]  # its CUDA library raises what Megatron does not catch


def main() -> None:
    import sglang
    import torch
    import torch.distributed as dist
    from servers import free_port
    from weightlink.plugins.megatron import cpu as megatron_cpu

    checkpoint, url, version = sys.argv[1:]
    os.environ["WEIGHTLINK_ENABLE"] = "1"
    engine = sglang.Engine(
        model_path=checkpoint, device="cpu", attention_backend="torch_native", skip_tokenizer_init=True,
        mem_fraction_static=0.5, max_total_tokens=512, disable_overlap_schedule=True, sleep_on_idle=True,
    )  # fmt: skip
    try:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        def check(action: str) -> object:
            request = CheckWeightsReqInput(action=action)
            return engine.loop.run_until_complete(engine.tokenizer_manager.check_weights(request, None))

        prompt = {"input_ids": [3, 14, 15], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
        native, before = str(check("checksum")), engine.generate(**prompt)["output_ids"]
        check("reset_tensors")
        poisoned = str(check("checksum"))
        megatron_cpu.install_cpu_patches()
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
        import weightlink
        from weightlink.converters.checkpoint import read_config
        from weightlink.plugins.megatron import load_hf

        chunks = megatron_cpu.build_model(read_config(Path(checkpoint)), dtype=torch.bfloat16)
        load_hf(chunks, checkpoint, timeout=60)
        with weightlink.connect(chunks, [engine, url], timeout=60.0) as link:
            report = link.push(int(version))
        result = {
            "poisoned": poisoned != native,
            "restored": str(check("checksum")) == native,
            "tokens": engine.generate(**prompt)["output_ids"] == before,
            "engines": [(e.name, e.committed) for e in report.engines],
            "version": engine.tokenizer_manager.weightlink.front.version,
        }
        print(json.dumps(result), flush=True)
        dist.destroy_process_group()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
