"""The command line and the environment that a server is started with."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from mm_grpo.errors import ConfigError
from mm_grpo.rollout.served import command
from mm_grpo.rollout.served.command import ServerSettings, server_command, server_environment
from mm_grpo.rollout.vllm.launch import EngineSettings

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="the command is that of an installed vLLM")

ROOT = Path(__file__).parents[2]
BASE = ROOT / "examples" / "shapes" / "base"
ENGINE = EngineSettings(
    str(BASE),
    "float32",
    512,
    mm_processor_kwargs=(("max_pixels", 3136),),
    max_images=2,
    engine_kwargs=(("max_num_seqs", 16),),
)


@needs_vllm
def test_a_server_is_started_as_the_engine_in_the_trainer_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MM_GRPO_SERVER_KEY", "secret-of-the-test")
    settings = ServerSettings(ENGINE, transfer="gloo", tensor_parallel=2, port=8123)
    words = server_command(settings)
    assert words[:3] == [sys.executable, "-P", "-m"] and words[3].startswith("vllm.entrypoints.")
    pairs = dict(pairwise(words))
    wanted = {
        "--model": str(BASE),
        "--dtype": "float32",
        "--max-model-len": "512",
        "--max-num-seqs": "16",
        "--tensor-parallel-size": "2",
        "--limit-mm-per-prompt": '{"image": 2, "video": 0}',
        "--mm-processor-kwargs": '{"max_pixels": 3136}',
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--weight-transfer-config": '{"backend": "mm_grpo_gloo"}',
        "--worker-extension-cls": "mm_grpo.rollout.served.plugin.WorkerExtension",
        "--scheduling-policy": "priority",
        "--host": "127.0.0.1",
        "--port": "8123",
        "--middleware": "mm_grpo.rollout.served.server_key.RequireKey",
    }
    assert {name: pairs.get(name) for name in wanted} == wanted
    assert {"--enable-scale-out", "--enforce-eager", "--no-enable-chunked-prefill"} <= set(words)
    assert "--distributed-executor-backend" not in words
    assert not any("secret" in word for word in words)


@needs_vllm
def test_a_server_at_a_socket_needs_no_key_and_has_no_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MM_GRPO_SERVER_KEY", raising=False)
    settings = ServerSettings(ENGINE, socket=tmp_path / "s")
    words = server_command(settings)
    assert words[words.index("--uds") + 1] == str(tmp_path / "s")
    assert "--middleware" in words and not {"--host", "--port"} & set(words)
    found = server_environment(settings)
    assert found["MM_GRPO_SERVER_OPEN"] == "1" and "MM_GRPO_SERVER_KEY" not in found
    at_a_port = ServerSettings(ENGINE, key="secret-of-the-test")
    found = server_environment(at_a_port)
    assert found["MM_GRPO_SERVER_KEY"] == "secret-of-the-test" and "secret" not in repr(at_a_port)
    assert "MM_GRPO_SERVER_OPEN" not in found


def test_an_older_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for found, words in ((None, "not installed"), (SimpleNamespace(origin=str(tmp_path / "a.py")), "0.32")):
        monkeypatch.setattr(command, "find_spec", lambda name, found=found: found)
        with pytest.raises(ConfigError, match=words):
            server_command(ServerSettings(ENGINE))


def test_a_server_is_in_none_of_the_trainers_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    found = server_environment(ServerSettings(ENGINE, gpus=("2", "3")))
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & found.keys()
    assert found["CUDA_VISIBLE_DEVICES"] == "2,3" and found["VLLM_SERVER_DEV_MODE"] == "1"
    assert found["PYTHONPATH"] == f"{ROOT}:/somewhere"
