"""Publishing at checkpoints, on real Megatron ranks and Megatron's real saves and loads. The engine is real up to its
model, which is the checkpoint's tensors (save_cases.py); the oracle of what was published is the Hugging Face
checkpoint that the trainer was loaded from, times a power of two, or three."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import toys
from megatron_cpu import Megatron
from servers import serve
from weightlink.plugins.megatron import run

SCRIPT = """
import sys
from pathlib import Path

def main(path, out, *names):
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import save
    from save_cases import model, scale, second, state_of

    chunks = model(path, 2.0, tp=dist.get_world_size())
    critic = second(path, tp=dist.get_world_size())
    for name in names:
        folder = Path(out) / name
        folder.mkdir(exist_ok=True)
        dist.barrier()
        save(state_of(critic if name.startswith("critic") else chunks), str(folder))
        if not name.startswith("critic"):
            scale(chunks, 2.0)
    (Path(out) / "ended").touch()
    sys.exit()

if __name__ == "__main__":  # Megatron starts processes that import this file
    main(*sys.argv[1:])
"""

TRAINING = {
    "megatron/training/__init__.py": "from .training import pretrain",
    "megatron/training/training.py": """
from .checkpointing import save_checkpoint

def pretrain(model, out, ckpt_format):
    context = {}
    for iteration in (3, 4):
        save_checkpoint(iteration, model, out, ckpt_format, checkpointing_context=context)
        for chunk in model:
            for parameter in chunk.parameters():
                parameter.data.mul_(2.0)
""",
    "megatron/training/checkpointing.py": """
from pathlib import Path
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

def save_checkpoint(iteration, model, out, ckpt_format, checkpointing_context=None):
    folder = Path(out) / f"iter_{iteration:07d}"
    folder.mkdir(exist_ok=True)
    dist.barrier()
    if ckpt_format == "torch":
        torch.save(model[0].state_dict(), folder / "model.pt")
    else:
        strategy = checkpointing_context.setdefault("save_strategy", TorchDistSaveShardedStrategy("torch_dist", 1))
        dist_checkpointing.save({"model": model[0].sharded_state_dict()}, str(folder), strategy)
    (Path(out) / "latest").write_text(str(iteration))
""",
    "pretrain.py": """
import sys

if __name__ == "__main__":
    from megatron.training import pretrain
    from save_cases import model

    pretrain(model(sys.argv[1], 2.0), *sys.argv[2:])
""",
}


@pytest.fixture(scope="module")
def megatron() -> Iterator[Megatron]:
    with Megatron() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(toys.make("qwen3", tmp_path_factory.mktemp("checkpoint") / "qwen3"))


@pytest.mark.parametrize(
    ("how", "asynchronous", "world", "parallel"),
    [
        ("plain", False, 2, {"tp": 2}),
        ("plain", True, 2, {"pp": 2}),
        ("parallel", False, 2, {}),
        ("parallel", True, 2, {"tp": 2}),
        ("inside out", False, 2, {}),
        ("registry", False, 1, {}),
    ],
)
def test_what_is_published_is_what_is_saved_and_loads(
    megatron, checkpoint, tmp_path, how, asynchronous, world, parallel
):
    answers = megatron.run(
        "save_cases:publish_and_save", world, timeout=240,
        path=checkpoint, out=str(tmp_path), how=how, asynchronous=asynchronous, **parallel,
    )  # fmt: skip
    for answer in answers:
        assert answer["loads"] == [True, True]
        assert (answer["saves"], answer["published"]) == (2, 19)
        assert answer["registered"] == (how == "registry")
    assert answers[0]["engine"] == [True, True]
    assert answers[0]["versions"] == [7, 19]


@pytest.mark.server
@pytest.mark.timeout(420)
def test_a_server_gets_what_is_saved(megatron, checkpoint, tmp_path):
    with serve(Path(checkpoint), tmp_path / "server", seconds=240, tp=2) as server:
        native = server.checksums()
        server.poison()
        assert server.checksums() != native
        run = dict(path=checkpoint, out=str(tmp_path), url=server.url, version=3, tp=2)
        assert megatron.run("save_cases:publish_to", 2, **run) == [True, True]
        assert server.checksums() == native
        assert server.http.get("/model_info").json()["weight_version"] == "3"


def test_weights_that_wait_for_their_gather_are_published_and_saved_fresh(megatron, checkpoint, tmp_path):
    answers = megatron.run("save_cases:after_steps", 2, path=checkpoint, out=str(tmp_path))
    assert any(answer["stale"] for answer in answers), "nothing was stale: the test shows nothing"
    assert answers[0]["same"] == [True] * 4
    assert answers[0]["optimizer"] > 0


@pytest.mark.parametrize(("asynchronous", "on_failure"), [(False, "raise"), (True, "raise"), (True, "log")])
def test_a_push_that_fails_is_raised_when_the_checkpoint_is_safe(
    megatron, checkpoint, tmp_path, asynchronous, on_failure
):
    ranks = megatron.run(
        "save_cases:failing", 2, timeout=240,
        path=checkpoint, out=str(tmp_path), asynchronous=asynchronous, on_failure=on_failure,
    )  # fmt: skip
    says = [
        "",
        "VersionError: this checkpoint's version is not higher",
        "ConfigError: the checkpoint's folder does not tell the iteration",
        "LayoutError: the checkpoint does not hold the model",
        "",
        "EngineUnavailable: cannot reach the engine",
    ]
    for saves in ranks:
        for save, words in zip(saves, says, strict=True):
            if on_failure == "raise":
                assert save["error"].startswith(words), save
                assert bool(save["error"]) == bool(words)
            else:
                assert save["error"] == ""
            assert save["complete"] == [True]
            assert save["loads"]
    assert [save["version"] for save in ranks[0]] == [5, 5, 5, 5, 7, 7]


@pytest.fixture
def launch(megatron, checkpoint, tmp_path) -> Callable[..., list[dict]]:
    """Runs ``SCRIPT``, or another file, under the launcher; the answer of every rank."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "out").mkdir()

    def start(*arguments: str, script: str = "script.py", world: int = 1, alive: bool = True, options=()) -> list[dict]:
        return megatron.run(
            "save_cases:launched", world, timeout=240,
            path=checkpoint, out=str(tmp_path / "out"), script=str(tmp_path / script),
            arguments=arguments, options=options, alive=alive,
        )  # fmt: skip

    return start


def test_an_unchanged_script_publishes_its_own_model_only(launch, tmp_path):
    answers = launch("iter_0000003", "critic-3", "iter_0000004", world=2)
    first = answers[0]
    assert [answer["error"] for answer in answers] == ["", ""]
    assert (first["version"], first["holds"], first["left"]) == (4, True, True)
    log = "\n".join(first["log"])
    assert "replaced megatron.core.dist_checkpointing.save" in log
    assert "it holds another model" in log
    assert (tmp_path / "out" / "ended").exists()
    assert (tmp_path / "out" / "critic-3" / "metadata.json").exists()


@pytest.mark.parametrize("options", [[], ["--weightlink-on-failure", "log"]])
def test_a_script_with_a_dead_engine_keeps_its_checkpoint(launch, tmp_path, options):
    (answer,) = launch("iter_0000003", "iter_0000004", alive=False, options=options)
    out = tmp_path / "out"
    assert (out / "iter_0000003" / "metadata.json").exists()
    goes_on = bool(options)
    assert answer["error"].startswith("" if goes_on else "EngineUnavailable")
    assert (out / "ended").exists() == (out / "iter_0000004").exists() == goes_on
    assert any("did not get the weights" in line for line in answer["log"])


@pytest.fixture
def training(tmp_path) -> Path:
    """A stand-in for the part of Megatron-LM that is not in the wheel: the order of its steps, and its imports."""
    for name, text in TRAINING.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "out"


def test_megatron_training_publishes_every_checkpoint(launch, training):
    (answer,) = launch("torch_dist", script="pretrain.py")
    assert answer["error"] == ""
    assert (answer["version"], answer["holds"]) == (4, True)
    assert "weightlink has replaced megatron.training.training.save_checkpoint" in answer["log"]


def test_megatron_training_names_its_checkpoint_before_the_error(launch, training):
    (answer,) = launch("torch_dist", script="pretrain.py", alive=False)
    assert answer["error"].startswith("EngineUnavailable")
    assert (training / "latest").read_text() == "3"


def test_a_format_that_cannot_be_published_is_an_error(launch, training):
    (answer,) = launch("torch", script="pretrain.py")
    assert answer["error"].startswith("ConfigError: the checkpoint is saved, but in a format")
    assert (training / "latest").read_text() == "3"


def test_a_patch_that_does_not_fit_is_an_error_and_a_repeated_one_changes_nothing(megatron):
    (answer,) = megatron.run("save_cases:unfit", 1)
    misfit, other = answer["errors"]
    assert "megatron.core.dist_checkpointing.save is not the function" in misfit
    assert "found: ('state', 'folder')" in misfit
    assert "to other engines or with other settings" in other
    assert answer["same"]
    assert answer["everywhere"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["script.py"], "--weightlink-engines"),
        (["--weightlink-engines", "http://a", "nowhere.py"], "no such script: nowhere.py"),
        (["--weightlink-engines", "http://a", "--weightlink-token-file", "nowhere", __file__], "cannot read the token"),
        (["--weightlink-engines", "http://a", "--weightlink-speed", "9", __file__], "SCRIPT"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(capsys, arguments, says):
    with pytest.raises(SystemExit) as left:
        run.main(arguments)
    assert left.value.code == 2
    assert says in capsys.readouterr().err
