"""Environments on an OpenEnv server: what the model is told and shown, what becomes of failures, and in a worker."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

pytest.importorskip("websockets")

from helpers.configs import small_config
from helpers.openenv_server import OpenEnvServer, png
from helpers.processes import refusing_port
from helpers.tiny import sample
from helpers.tool_calls import call_tool, reward
from tools_to_isolate import Impatient

from mm_grpo.environments.openenv import OpenEnv, shown
from mm_grpo.environments.toolbox import Toolbox, toolbox_of
from mm_grpo.errors import ConfigError, ToolError

pytestmark = pytest.mark.lowest


def box_of(what: Any, **rollout: Any) -> Toolbox:
    """A toolbox over a server's address, or over what makes environments."""
    values = {"environment_workers": 0, **rollout}
    if isinstance(what, str):
        values["environment"] = f"openenv:{what}"
    box = toolbox_of(small_config("m", rollout=values), None, None if isinstance(what, str) else what)
    assert box is not None
    return box


def test_a_conversation_with_a_server() -> None:
    with OpenEnvServer() as server:
        box = box_of(server.url)
        (function,) = [schema["function"] for schema in box.schemas]
        assert (function["name"], function["description"]) == ("walk", "Walk along the road.")
        assert function["parameters"] == {
            "type": "object",
            "properties": {
                "direction": {"enum": ["left", "right"], "type": "string"},
                "steps": {"type": "integer", "default": 1, "description": "How many."},
            },
            "required": ["direction"],
        }
        row = box.prepare(sample("train:0", start=2, text="What now?"))
        assert row.messages[-1]["content"][-1] == {"type": "text", "text": "You are at 2."}
        one, other = box.episodes([row, row])
        seen = call_tool(box, one, "walk", {"direction": "left"})
        assert seen.text == '{"at": 1}' and [i.size for i in seen.media] == [(40, 40)]
        assert seen.media[0].getpixel((3, 3)) == (255, 0, 0) and not one.done
        assert (
            call_tool(box, other, "walk", {"direction": "right", "steps": 2}).text == '{"at": 4}'
            and other.done
        )
        assert (reward(box, one), reward(box, other)) == (0.25, 1.0)
        assert call_tool(box, other, "walk", {"direction": "left"}).fault == "raised"  # it is over
        assert call_tool(box, one, "walk", {}).fault == "bad_arguments"
        refused = call_tool(box, one, "walk", {"direction": "up"})
        assert refused.fault == "raised" and "direction is wrong" in refused.text and one.masked is None
        assert "too tired" in call_tool(box, one, "walk", {"direction": "left", "steps": 10}).text
        assert call_tool(box, one, "walk", {"direction": "left"}).fault is None
        begun = [r for r in server.resets if "start" in r]
        assert {r["start"] for r in begun} == {2} and "images" not in begun[-1]
        assert len({r["seed"] for r in begun}) == 1  # of the row, in all conversations
        box.close()
        assert server.closed()


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("closes", "died"),
        ("html", "died"),
        ("odd_reward", "died"),
        ("ends", "died"),
        pytest.param("hang", "timed_out", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_fails_takes_the_conversation_with_it(
    mode: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OpenEnvServer(mode) as server:
        monkeypatch.setenv("TESTED_OPENENV", server.url)
        what = Impatient if mode == "hang" else server.url
        box, stopping = box_of(what), box_of(what, on_tool_error="stop")
        one, other = (each.episodes([each.prepare(sample("train:7"))])[0] for each in (box, stopping))
        if mode == "ends":
            server.stop()
        assert call_tool(box, one, "walk", {"direction": "left"}).fault == fault
        assert one.masked is not None and server.url in one.masked and reward(box, one) is None
        assert one.lost is not None and server.url in one.lost
        with pytest.raises(ToolError, match=f"train:7: walk: .*{server.url}"):
            call_tool(stopping, other, "walk", {"direction": "left"})
        box.close()
        stopping.close()
        server.released.set()
        assert server.closed()


def test_mcp_tools_of_a_server() -> None:
    with OpenEnvServer("mcp") as server:
        box = box_of(server.url)
        (function,) = [schema["function"] for schema in box.schemas]
        assert function["name"] == "echo_message" and function["parameters"]["required"] == ["message"]
        row = box.prepare(sample("train:0"))
        opening = row.messages[-1]["content"][-1]["text"]
        assert json.loads(opening) == {"status": "ready", "message": "Echo environment ready!"}
        (one,) = box.episodes([row])
        assert call_tool(box, one, "echo_message", {"message": "hi"}).text == "hi"
        seen = call_tool(box, one, "echo_message", {"message": "look"})
        assert seen.text == "look" and [image.size for image in seen.media] == [(40, 40)]
        refused = call_tool(box, one, "echo_message", {"message": 3})
        assert refused.fault == "raised" and "valid string" in refused.text and one.masked is None
        assert reward(box, one) is None
        box.close()


def test_the_place_of_a_closed_conversation_is_free() -> None:
    with OpenEnvServer("slow_close") as server:
        environment = OpenEnv(server.url)
        for _ in range(2):
            environment.reset()
            environment.close()
            assert server.open == 0


def test_servers_that_cannot_serve() -> None:
    with refusing_port() as port, pytest.raises(ConfigError, match=f"rollout.environment: .*:{port}"):
        box_of(f"http://127.0.0.1:{port}")
    for mode in ("http", "no_schema"):
        with OpenEnvServer(mode) as server, pytest.raises(ConfigError, match=server.url):
            box_of(server.url)
    with OpenEnvServer("full") as server, pytest.raises(ToolError, match="CAPACITY_REACHED"):
        box_of(server.url).prepare(sample("train:0"))


def test_a_subclass_says_what_its_steps_pay() -> None:
    class Walk(OpenEnv):
        def get_reward(self) -> float:
            return self.rewards[-1]

    with OpenEnvServer() as server:
        box = box_of(lambda: Walk(server.url))
        one = box.episodes([box.prepare(sample("train:0", start=0))])[0]
        seen = [call_tool(box, one, "walk", {"direction": "right"}) for _ in range(4)]
        assert [each.text for each in seen] == [f'{{"at": {n}}}' for n in (1, 2, 3, 4)]
        assert one.done and reward(box, one) == 1.0
        box.close()


ROWS = [[[255, 0, 0]] * 9] * 8


@pytest.mark.parametrize(
    ("observation", "text", "images"),
    [
        ({"echo": "hi", "extra": None, "more": {}, "none": []}, "hi", 0),
        ({"a": 1, "b": "é", "none": None}, '{"a": 1, "b": "é"}', 0),
        ({}, "", 0),
        ({"screenshot": png(20), "text": "a page"}, "a page", 1),
        ({"screenshot": ROWS, "shape": [8, 9]}, '{"shape": [8, 9]}', 1),
        ({"views": [png(20), png(30)], "n": 2, "m": 0}, '{"n": 2, "m": 0}', 2),
        ({"content": ["one", {"type": "image", "data": png(20), "mimeType": "image/png"}]}, '{"content": ["one"]}', 1),
        ({"screen": [255] * 192, "screen_shape": [8, 8, 3]}, '{"screen_shape": [8, 8, 3]}', 1),
        ({"screen": [1, 2], "screen_shape": [8, 8, 3]}, '{"screen": [1, 2], "screen_shape": [8, 8, 3]}', 0),
        ({"numbers": [[1, 2], [3, 4]], "t": "/9j/ is"}, '{"numbers": [[1, 2], [3, 4]], "t": "/9j/ is"}', 0),
    ],
)  # fmt: skip
def test_what_the_model_sees_of_an_observation(observation: Any, text: str, images: int) -> None:
    parts = shown(json.loads(json.dumps(observation)))
    assert "".join(part["text"] for part in parts if part["type"] == "text") == text
    assert sum(part["type"] == "image" for part in parts) == images


def test_images_are_those_that_were_sent() -> None:
    (part,) = shown({"screenshot": png(20)})
    assert part["image"] == base64.b64decode(png(20))
    (part,) = shown({"screenshot": ROWS})
    assert part["image"].size == (9, 8) and part["image"].getpixel((8, 7)) == (255, 0, 0)
