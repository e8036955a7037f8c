"""Tools and environments in worker processes: equal answers, deadlines, failures by policy, and no process left."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import small_config
from helpers.patience import PATIENCE
from helpers.sessions import died, workers
from helpers.tiny import picture, sample, video
from helpers.tool_calls import call_all, call_tool, reward
from PIL import Image
from tools_to_isolate import World, misbehave, nap

from mm_grpo.environments.builtins import Zoom
from mm_grpo.environments.host import Episode, LocalHost
from mm_grpo.environments.toolbox import Toolbox
from mm_grpo.environments.workers import WorkerHost
from mm_grpo.errors import ConfigError, ToolError
from mm_grpo.types import Video
from mm_grpo.user_code.workers import default_size

Make = Callable[..., Toolbox]
TIMEOUT = 0.5
"""Seconds of a call in the tests of calls that hang; in the others a busy machine has 60."""


def begun(box: Toolbox, count: int = 1, **columns: Any) -> list[Episode]:
    """Conversations about one row, begun without a look at what they show first."""
    row = sample("train:0", **columns)
    return box.host.open([(row, box._row(row))] * count)


def plain(part: Any) -> Any:
    """A part of an observation, which can be compared."""
    if isinstance(part, Video):
        return [*map(plain, part.frames)], part.times, part.fps
    return part if isinstance(part, str) else (part.mode, part.size, part.tobytes())


def story(box: Toolbox) -> list[Any]:
    """Everything that three conversations show."""
    rows = [sample(f"train:{n}", "look", (picture(n, 90, 70),), (video(n),), start=n) for n in (3, 98, 7)]
    prepared = [box.prepare(row) for row in rows]
    episodes = box.episodes(prepared)
    calls = [(e, "act", {}) for e in episodes for _ in range(2)]
    faults = ("raise", "huge image", "half a character", "sys.exit")
    calls += [(episodes[0], "act", {"how": how}) for how in faults]
    calls += [
        (episodes[1], "unknown", {}),
        (episodes[2], "act", {"what": 1}),
        (episodes[2], "nap", {"seconds": 0}),
    ]
    ways = ("unshowable", "many images", "video", "long video", "torn video")
    calls += [(episodes[2], "act", {"how": how}) for how in ways]
    seen = call_all(box, calls)
    seen[-6] = seen[0]  # the process that napped
    observations = [*(e.opening for e in episodes), *seen]
    shown = [([*map(plain, one.parts)], one.fault) for one in observations if one is not None]
    return [shown, [e.done for e in episodes], box.host.rewards(episodes), [p.messages for p in prepared]]


def test_videos_are_opened_where_the_tool_is_called(make: Make, tmp_path: Path) -> None:
    """A file and a list of frames, under the config's `video_max_frames`; the colours are those of a GIF's palette."""
    pictures = [Image.new("RGB", (8, 6), (0, 40 * number, 255)) for number in range(6)]
    file = tmp_path / "a.gif"
    pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=500)
    ways = (str(file), "frames", "none.gif")
    for processes in (0, 1):
        box = make((), World, environment_workers=processes)
        (one,) = begun(box)
        clip, frames, fault = (call_tool(box, one, "act", {"how": how}) for how in ways)
        assert plain(clip.parts[0]) == ([*map(plain, pictures[2:])], (1.0, 1.5, 2.0, 2.5), 2.0)
        (video,) = frames.media
        assert (len(video.frames), video.times[0], video.times[-1]) == (32, 0.0, 39 / 8)
        assert video.fps == 32 / 40 * 8
        assert fault.fault == "bad_result" and "none.gif" in fault.text


def test_answers_are_equal_in_and_out_of_the_process(make: Make) -> None:
    options = {"tool_timeout": 20, "on_tool_error": "reply"}
    inside, outside = (story(make([nap], World, environment_workers=n, **options)) for n in (0, 2))
    assert inside == outside
    shown, done, rewards, _ = inside
    assert done == [False, True, False] and rewards == [9 / 3, 100 / 3, 14 / 3]
    assert [fault for _, fault in shown if fault] == [
        "raised", "bad_result", "raised", "unknown_tool", "bad_arguments", "bad_result", "bad_result", "bad_result",
    ]  # fmt: skip
    texts = [text for parts, _ in shown for text in parts if isinstance(text, str)]
    assert "total 4" in texts and "a?b" in texts and "error: SystemExit: 0" in texts
    assert "error: the answer cannot be shown (RuntimeError: nor shown)" in texts
    assert shown[0][0][1][:2] == ("RGB", (90, 70)) and shown[0][0][2] == plain(video(3))
    text, clip, frame = shown[-3][0]
    pixels = [("RGB", (8, 6), bytes((number, 9, 9)) * 48) for number in range(3)]
    assert (text, clip, frame) == ("now", (pixels, (7, 7 + 1 / 3, 7 + 2 / 3), 3), pixels[1])
    assert all("40 frames" in text or "2 size(s)" in text for (text,), _ in shown[-2:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "fault", "told"),
    [
        ("exit", "died", "code 3"),
        ("hang", "timed_out", "rollout.tool_timeout"),
    ],
)
def test_a_call_without_an_answer_takes_its_conversations_with_it(
    make: Make, how: str, fault: str, told: str
) -> None:
    box = make((), World, tool_timeout=TIMEOUT if how == "hang" else 60)
    episodes = begun(box, 4)
    places = [call_tool(box, one, "where", {}).text for one in episodes]
    assert places == [places[0], places[1]] * 2 and places[0] != places[1]
    start = time.monotonic()
    calls: list[Any] = [(episodes[0], "act", {"how": how}), (episodes[0], "act", {})]
    seen = call_all(box, [*calls, *((e, "act", {}) for e in episodes[1:])])
    assert time.monotonic() - start < TIMEOUT + PATIENCE
    assert seen[0].fault == fault and told in seen[0].text
    assert episodes[0].masked == f"act: {seen[0].text}" and seen[1].fault == "died"
    assert [e.masked is None for e in episodes] == [False, True, False, True]
    assert [one.text for one in (seen[2], seen[4])] == ["total 1" + '{"a": 1}'] * 2
    assert box.host.rewards(episodes) == [None, 1 / 3, None, 1 / 3]
    after = begun(box, 2, start=5)  # in processes that were started anew
    assert box.host.rewards(after) == [5 / 3, 5 / 3] and died([int(places[0])])


@pytest.mark.slow
@pytest.mark.parametrize(("how", "fault"), [("hang", "timed_out"), ("exit", "died")])
def test_a_call_without_an_answer(make: Make, how: str, fault: str) -> None:
    limit = TIMEOUT if how == "hang" else 60
    for policy in ("reply", "mask"):
        box = make([misbehave, nap], None, tool_timeout=limit, on_tool_error=policy)
        one, other = begun(box, 2)
        naps = [(episode, "nap", {"seconds": 0}) for episode in (one, other)]
        calls = [(one, "misbehave", {"how": how}), *naps]
        seen = call_all(box, calls)
        masked = how == "hang" or policy == "mask"  # functions hold nothing that could be lost
        assert [s.fault for s in seen] == [fault, "died" if masked else None, None]
        assert (one.masked is not None, other.masked) == (masked, None)
    box = make((), World, tool_timeout=limit, on_tool_error="stop")
    with pytest.raises(ToolError, match="train:0: act"):
        call_tool(box, begun(box)[0], "act", {"how": how})


@pytest.mark.parametrize("policy", ["reply", "mask", "stop"])
def test_an_exception_by_policy(make: Make, policy: str) -> None:
    box = make((), World, on_tool_error=policy)
    one, other = begun(box, 2)
    if policy == "stop":
        with pytest.raises(ToolError, match="train:0: act raised KeyError: 'the shelf is empty'"):
            call_tool(box, one, "act", {"how": "raise"})
        return
    assert call_tool(box, one, "act", {"how": "raise"}).text == "error: KeyError: 'the shelf is empty'"
    assert (one.masked is None) == (policy == "reply")
    assert box.host.rewards([one, other]) == ([1 / 3, 0.0] if policy == "reply" else [None, 0.0])


@pytest.mark.slow
def test_a_reset_without_an_answer(make: Make, how: str = "hang") -> None:
    box = make((), World, tool_timeout=TIMEOUT)
    with pytest.raises(ToolError, match=r"train:0: reset of the environment: its worker process"):
        box.prepare(sample("train:0", begins=how))
    (one,) = begun(box, begins=how)  # one that had begun before: only this conversation is lost
    assert one.lost and one.masked is None and call_tool(box, one, "act", {}).fault == "died" and one.masked
    (fine,) = begun(box)
    assert call_tool(box, fine, "act", {}).fault is None


@pytest.mark.parametrize("how", ["kill", "words"])
def test_a_reward_without_an_answer(make: Make, how: str) -> None:
    box = make((), World)
    one, other = begun(box, scores=how)[0], begun(box)[0]
    if how == "words":
        with pytest.raises(ToolError, match="train:0: get_reward"):
            reward(box, one)
    else:
        assert box.host.rewards([one, other]) == [None, 0.0] and one.masked is not None
    assert reward(box, begun(box, scores="number of numpy")[0]) == 0.1


@pytest.mark.slow
def test_environments_are_closed_whatever_one_of_them_does(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = tmp_path / "ends"
    box = make((), World, tool_timeout=TIMEOUT)
    for start, end in ((1, str(ends)), (2, "raise"), (3, str(ends))):
        begun(box, start=start, ends=end)
    with pytest.raises(ToolError, match="train:0: close of the environment raised KeyError"):
        box.host.close_episodes()
    assert sorted(ends.read_text().split()) == ["1", "3"]
    begun(box, ends="hang")
    with caplog.at_level(logging.WARNING):
        box.close()
    assert "train:0: error: close of the environment had not answered after 0.5 s" in caplog.text


def test_an_interrupt_leaves_no_call_behind(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    box = make([nap], tool_timeout=60)
    one, other = begun(box, 2)
    host: Any = box.host
    wait = host.workers.wait

    def interrupted(seconds: float | None) -> Any:
        if all(worker.ready and worker.busy for worker in host.workers):
            raise KeyboardInterrupt
        return wait(seconds)

    monkeypatch.setattr(host.workers, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call_all(box, [(e, "nap", {"seconds": 600}) for e in (one, other)])
    monkeypatch.undo()
    assert workers() == []
    seen = call_all(box, [(e, "nap", {"seconds": 0}) for e in (one, other)])
    assert [s.fault for s in seen] == [None, None]


def test_a_worker_that_died_between_calls_is_noticed(make: Make) -> None:
    box = make((), World, environment_workers=1)
    held, idle = begun(box, 2)
    (worker,) = workers()
    os.kill(worker, signal.SIGKILL)
    assert died([worker])
    (one,) = begun(box, start=5)  # its reset went to the worker that was killed, and is made by the next
    assert held.lost is not None and one.lost is None and workers() != [worker]
    assert call_tool(box, one, "act", {}).parts[1] == "total 6" and reward(box, one) == 6 / 3
    assert call_tool(box, idle, "act", {}).fault == "died" and idle.masked is not None


def test_tools_run_in_processes_where_others_can_import_them(make: Make) -> None:
    def closure(a: int) -> int:
        """Add.

        Args:
            a: What.
        """
        return a

    for tools, factory in (([nap], None), ((), World), ((), Zoom)):
        box = make(tools, factory, environment_workers=None)
        assert isinstance(box.host, WorkerHost) and len(box.host.slots) == default_size()
    for tools, factory in (([closure], None), ([nap, closure], None), ((), lambda: World())):
        assert isinstance(make(tools, factory, environment_workers=None).host, LocalHost)
    with pytest.raises(ConfigError, match="closure"):
        WorkerHost(1, small_config("m"), {"closure": closure}, None, None)


def test_a_reward_that_asks_for_the_environment_keeps_it_in_the_process(make: Make) -> None:
    box = make((), World, environment_workers=None)
    assert isinstance(box.place(["mine"]), LocalHost)
    (one,) = begun(box)
    assert isinstance(one.environment, World)
    box.place([], processes=2)
    with pytest.raises(ConfigError, match="'mine'"):
        box.place(["mine"], processes=2)
    with pytest.raises(ConfigError, match=r"environment_workers.*'mine'"):
        make((), World).place(["mine"])


@pytest.mark.field_bug("hangs")
def test_a_call_that_hangs_in_the_trainers_process_stops_the_run() -> None:
    release = threading.Event()

    def hang() -> str:
        """Hang."""
        return str(release.wait(600))

    box = Toolbox(small_config("m", rollout={"environment_workers": 0, "tool_timeout": 0.3}), [hang], None)
    (one,) = begun(box)
    with pytest.raises(ToolError, match=r"train:0: hang .*rollout\.tool_timeout"):
        call_tool(box, one, "hang", {})
    assert call_tool(box, one, "hang", {}).fault == "died"  # what it held is not ours any more
    box.close()
    assert not release.is_set()  # nobody waited for it
    release.set()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_that_hangs_when_it_is_made(workers: int) -> None:
    release = threading.Event()

    def stuck() -> Any:
        release.wait(600)

    options = {"environment_workers": workers, "tool_timeout": 0.3}
    with pytest.raises(ConfigError, match=r"stuck.*rollout\.tool_timeout"):
        Toolbox(small_config("m", rollout=options), [], stuck)
    release.set()
