"""Machine profiles: those that come with pyxdev, how well h200x2 fits what was measured, and what is refused."""

import re
from pathlib import Path

import pytest

from pyxdev._native import HOST, Runtime
from pyxdev.backends import sim
from pyxdev.errors import SettingError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize("name", sim.profiles())
def test_every_profile_opens(name):
    machine = sim.resolve(name)
    assert machine["profile"] == name
    with Runtime(sim.driver(name)) as runtime:
        assert runtime.device_count == machine["device"]["count"]
        for device in range(runtime.device_count):
            assert runtime.device_info(device).name == machine["device"]["name"]
            assert runtime.memory_info(device)[1] == machine["device"]["memory_gib"] * GIB


def test_the_profiles_of_the_plan_are_there():
    assert set(sim.profiles()) >= {"default", "mi50x10", "mi50x4-peer", "gtx1080ti-islands", "h200x2", "h200x8"}


def peers(name):
    with Runtime(sim.driver(name)) as runtime:
        devices = range(runtime.device_count)
        return {(a, b) for a in devices for b in devices if a != b and runtime.peer_capable(a, b)}


def test_peer_access_of_the_profiles():
    assert peers("mi50x10") == set()
    assert peers("h200x2") == {(0, 1), (1, 0)}
    assert len(peers("mi50x4-peer")) == 12
    islands = [range(4), range(4, 6)]
    assert peers("gtx1080ti-islands") == {(a, b) for island in islands for a in island for b in island if a != b}


# ---- h200x2 against what was measured: bytes, microseconds ----

ALONE = {4 * KIB: 8.6, 64 * KIB: 9.7, MIB: MIB / 37e3, 64 * MIB: 64 * MIB / 54e3, 256 * MIB: 256 * MIB / 55e3}
DIRECT = {4 * KIB: 8.6, 64 * KIB: 8.3, MIB: MIB / 94e3, 12 * MIB: 12 * MIB / 307e3, 256 * MIB: 256 * MIB / 388e3}
STAGED = {  # bytes: tile, microseconds, microseconds of the submitting thread
    256 * KIB: (128 * KIB, 256 * KIB / 11.2e3, 9),
    MIB: (512 * KIB, MIB / 22.7e3, 8),
    4 * MIB: (MIB, 4 * MIB / 35.2e3, 17),
    12 * MIB: (2 * MIB, 12 * MIB / 42.2e3, 28),
    64 * MIB: (4 * MIB, 64 * MIB / 49.2e3, 82),
    256 * MIB: (4 * MIB, 256 * MIB / 51.1e3, None),
}
TOLERANCE = 0.1


@pytest.fixture
def h200x2():
    with Runtime(sim.driver("h200x2")) as runtime:
        yield runtime


def timed(runtime, enqueue, event):
    """Microseconds until the event that `enqueue` records has been waited for, and until all was submitted."""
    begin = runtime.clock()
    enqueue()
    submitted = runtime.clock()
    assert event.wait()
    return (runtime.clock() - begin) * 1e6, (submitted - begin) * 1e6


def test_h200x2_copies_to_the_host(h200x2):
    stream, event = h200x2.stream(0), h200x2.event()
    for nbytes, measured in ALONE.items():
        device, host = h200x2.buffer(0, nbytes), h200x2.buffer(HOST, nbytes)

        def enqueue(device=device, host=host, nbytes=nbytes):
            stream.copy(host.address, device.address, nbytes, dst_device=HOST, src_device=0)
            event.record(stream)

        assert timed(h200x2, enqueue, event)[0] == pytest.approx(measured, rel=TOLERANCE), nbytes
        device.close()
        host.close()
    stream.close()
    event.close()


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_h200x2_copies_between_devices(h200x2, path):
    event = h200x2.event()
    for nbytes, measured in (DIRECT if path == "direct" else STAGED).items():
        tile, measured, submission = measured if path == "staged" else (0, measured, None)
        source, target = h200x2.buffer(0, nbytes), h200x2.buffer(1, nbytes)
        link = h200x2.link(0, 1, path=path, tile_bytes=tile, max_bytes=nbytes)

        def enqueue(link=link, source=source, target=target, nbytes=nbytes):
            link.copy(target.address, source.address, nbytes, arrived=event)

        took, submitted = timed(h200x2, enqueue, event)
        assert took == pytest.approx(measured, rel=TOLERANCE), nbytes
        if submission is not None and nbytes >= 4 * MIB:  # below, the first call weighs, and clocks tick
            assert submitted == pytest.approx(submission, rel=0.3), nbytes
        for thing in (link, source, target):
            thing.close()
    event.close()


# ---- profiles of users ----


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_profile_of_your_own(tmp_path):
    path = write(
        tmp_path,
        """
        summary = "mixed cards"
        [device]
        count = 3
        memory_gib = 8
        [[other]]
        devices = [2]
        name = "iGPU"
        integrated = true
        memory_gib = 64
        to_host_gb_s = 1.5
        [peer]
        groups = [[0, 1]]
        [[pair]]
        pairs = [[2, 0]]
        capable = true
        gb_s = 2
        """,
    )
    low = sim.lower(sim.resolve(path))
    assert [device["name"] for device in low["devices"]] == ["Simulated device", "Simulated device", "iGPU"]
    assert [device["memory"] // GIB for device in low["devices"]] == [8, 8, 64]
    assert [device["down_rate"] for device in low["devices"]] == [25_000_000_000, 25_000_000_000, 1_500_000_000]
    capable = {(i // 3, i % 3): pair["rate"] for i, pair in enumerate(low["peers"]) if pair["capable"]}
    assert capable == {(0, 1): 50_000_000_000, (1, 0): 50_000_000_000, (2, 0): 2_000_000_000}
    with Runtime(sim.driver(path)) as runtime:
        assert [runtime.device_info(device).integrated for device in range(3)] == [False, False, True]


def test_changes_to_a_profile():
    machine = sim.resolve({"profile": "mi50x10", "device": {"count": 4}, "run": {"seed": 3}})
    assert machine["device"]["count"] == 4
    assert machine["device"]["arch"] == "gfx906"
    assert machine["run"]["seed"] == 3


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[device]\ncount = 0", "device.count is 0; allowed: a whole number from 1 to 1024"),
        ("[device]\ncount = true", "device.count is True; allowed: a whole number"),
        ("[device]\ncount = 2.0", "device.count is 2.0; allowed: a whole number"),
        ("[device]\nname = ''", "device.name is ''; allowed: text of 1 to 127 characters"),
        ("[device]\nmemory_gib = 'much'", "device.memory_gib is 'much'; allowed: a number"),
        ("[device]\nmemory_gib = nan", "device.memory_gib is nan; allowed: a number"),
        ("[device]\nlatency_us = -1", "device.latency_us is -1; allowed: a number from 0"),
        ("[device]\nmemory_gb = 3", "device.memory_gb is unknown; allowed: count, name, arch, memory_gib"),
        ("device = 3", "device is 3; allowed: a table of count, name"),
        ("[devices]\ncount = 3", "devices is unknown; allowed: summary, device, host, peer"),
        ("summary = 1", "summary is 1; allowed: text"),
        ("[peer]\ngroups = 'some'", 'peer.groups is \'some\'; allowed: "all", "none" or a list of lists'),
        ("[peer]\ngroups = [[0, 4]]", "peer.groups names device 4; allowed: 0 to 3"),
        ("[peer]\ngroups = [[0, -1]]", "peer.groups names device -1; allowed: 0 to 3"),
        ("[peer]\nroute = 'air'", "peer.route is 'air'; allowed: link, host"),
        ("[[pair]]\npairs = [[0, 1, 2]]", "pair[0].pairs is [[0, 1, 2]]; allowed: a list of [device, device]"),
        ("[[pair]]\ncapable = true", "pair[0] has no pairs; allowed: a list of [device, device]"),
        ("[[other]]\ndevices = [9]", "other.devices names device 9; allowed: 0 to 3"),
        ("[[fault]]\nkind = 'melt'", "fault[0].kind is 'melt'; allowed: drop, zero, mirror"),
        (
            "[[fault]]\nkind = 'drop'\nfrom = 'gpu'",
            'fault[0].from is \'gpu\'; allowed: a device number, "host" or "any"',
        ),
        ("[[fault]]\nkind = 'drop'\nto = 4", "fault names device 4; allowed: 0 to 3"),
        ("[fault]\nkind = 'drop'", "fault is {'kind': 'drop'}; allowed: a list of tables"),
        ("[run]\nseed = -1", "run.seed is -1; allowed: a whole number from 0"),
        ("count =", "not a TOML file"),
    ],
)
def test_a_bad_profile_says_what_is_wrong(tmp_path, text, wanted):
    path = write(tmp_path, text)
    with pytest.raises(SettingError) as caught:
        sim.driver(path)
    assert path in str(caught.value)
    assert wanted in str(caught.value)


def test_unknown_profiles():
    with pytest.raises(SettingError, match=re.escape("profile is 'mi60'; allowed: default, gtx1080ti-islands, h200x2")):
        sim.driver("mi60")
    with pytest.raises(SettingError, match="No such file"):
        sim.driver("/nowhere/mine.toml")
    with pytest.raises(SettingError, match="machine is 3; allowed: a profile's name, a path, or a mapping"):
        sim.resolve(3)  # type: ignore[arg-type]


# ---- the documentation ----


def test_what_the_documentation_shows_is_accepted(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text("utf-8")
    shown = re.findall(r"```toml\n(.*?)```", text, re.S)
    assert len(shown) == 2
    for example in shown:
        sim.resolve(write(tmp_path, example))
    table = text[text.index("## Faults") :]
    for kind in sim.sim_faults():
        assert re.search(rf"^\| (\w+, )*{kind}[,| ]", table, re.M), kind
    for name in sim.profiles():
        assert f"| {name} |" in text
