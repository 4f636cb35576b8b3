"""The machine's memory from recorded trees: control groups of both versions, ZFS, pressure, kills."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relevo.devices.cgroups import ControlGroups, MemoryLimit
from relevo.devices.device import Device
from relevo.devices.events import DeviceEvent, DeviceEventKind, EventBox
from relevo.devices.host import LIMIT_TOLD_EVERY_S, HostDevice, host_memory, memory_available, usable_cores

MIB = 1 << 20
GIB = 1 << 30
FILES = (
    "proc/self/cgroup",
    "proc/self/mountinfo",
    "proc/pressure/memory",
    "proc/vmstat",
    "proc/spl/kstat/zfs/arcstats",
    "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/memory.high",
    "sys/fs/cgroup/memory.current",
    "sys/fs/cgroup/memory.stat",
    "sys/fs/cgroup/memory.events",
    "sys/fs/cgroup/memory/memory.limit_in_bytes",
    "sys/fs/cgroup/memory/memory.usage_in_bytes",
    "sys/fs/cgroup/memory/memory.oom_control",
    "sys/fs/cgroup/cpu.max",
)
ODD = (
    b"0",
    b"-7",
    b"max",
    b"max 0",
    b"-1 100000",
    b"5 -3",
    b"9" * 30,
    b"1e9",
    b"\n\n",
    b"oom_kill x",
    b"size 4 -9\nc_min 4 1",
)


def write(root: Path, name: str, text: str | int) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def group_v2(root: Path, group: str, **files: str | int) -> None:
    for name, text in files.items():
        write(root, f"sys/fs/cgroup{group}/{name.replace('_', '.', 1)}", text)


def meminfo(root: Path, total: int, available: int) -> None:
    write(root, "proc/meminfo", f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\nSwapTotal: 0 kB")


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    """A machine with version 2 only; we are two levels down in a service's group."""
    meminfo(tmp_path, 32 * GIB, 20 * GIB)
    write(tmp_path, "proc/self/cgroup", "0::/ai.slice/relevo.service")
    write(
        tmp_path,
        "proc/self/mountinfo",
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate",
    )
    group_v2(tmp_path, "/ai.slice", memory_max=8 * GIB, memory_current=6 * GIB, memory_stat="anon 5\ninactive_file 0")
    group_v2(tmp_path, "/ai.slice/relevo.service", memory_max="max", memory_current=GIB)
    return tmp_path


def test_without_groups_the_machine_itself_counts(tmp_path: Path) -> None:
    meminfo(tmp_path, 32 * GIB, 20 * GIB)
    host = HostDevice(root=tmp_path, clock=lambda: 7.0)
    assert isinstance(host, Device)
    reading = host.read()
    assert (reading.total_bytes, reading.free_bytes, reading.read_at) == (32 * GIB, 20 * GIB, 7.0)
    assert memory_available(tmp_path) == 20 * GIB
    assert "It does not tell what other programs are about to take" in host.tells


def test_a_limit_of_a_group_above_ours_counts(unified: Path) -> None:
    assert ControlGroups(unified).memory_limits() == (MemoryLimit("/ai.slice", 8 * GIB, 2 * GIB),)
    reading = HostDevice(root=unified).read()
    assert (reading.total_bytes, reading.free_bytes) == (8 * GIB, 2 * GIB)
    assert "a limit of 8.0 GiB is set for the group /ai.slice" in HostDevice(root=unified).tells


def test_the_tightest_limit_on_the_way_up_counts(unified: Path) -> None:
    group_v2(unified, "/ai.slice/relevo.service", memory_max=4 * GIB, memory_current=GIB)
    reading = HostDevice(root=unified).read()
    assert (reading.total_bytes, reading.free_bytes) == (4 * GIB, 2 * GIB)  # the total of ours, what is left above
    group_v2(unified, "/ai.slice/relevo.service", memory_current=3 * GIB)
    assert HostDevice(root=unified).read().free_bytes == GIB


def test_above_the_limit_where_the_kernel_slows_us_down_nothing_is_free(unified: Path) -> None:
    group_v2(unified, "/ai.slice/relevo.service", memory_max="max", memory_high=2 * GIB, memory_current=3 * GIB)
    reading = HostDevice(root=unified).read()
    assert (reading.total_bytes, reading.free_bytes) == (2 * GIB, 0)


def test_pages_of_files_that_can_be_dropped_are_free(unified: Path) -> None:
    group_v2(unified, "/ai.slice", memory_stat=f"anon 5\ninactive_file {GIB}")
    assert HostDevice(root=unified).read().free_bytes == 3 * GIB
    group_v2(unified, "/ai.slice", memory_stat=f"inactive_file {99 * GIB}")  # cannot be: no more than is used
    assert ControlGroups(unified).memory_limits()[0].left_bytes == 8 * GIB


def test_a_neighbour_in_no_group_still_takes_the_machines_memory(unified: Path) -> None:
    meminfo(unified, 32 * GIB, GIB)
    assert HostDevice(root=unified).read().free_bytes == GIB


def test_inside_a_container_its_own_top_group_counts(tmp_path: Path) -> None:
    meminfo(tmp_path, 32 * GIB, 20 * GIB)
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw")
    group_v2(tmp_path, "", memory_max=512 * MIB, memory_current=400 * MIB, memory_stat=f"inactive_file {100 * MIB}")
    assert ControlGroups(tmp_path).memory_limits() == (MemoryLimit("/", 512 * MIB, 212 * MIB),)


def test_a_group_outside_the_containers_view_is_read_where_it_is_mounted(tmp_path: Path) -> None:
    meminfo(tmp_path, 32 * GIB, 20 * GIB)
    write(tmp_path, "proc/self/cgroup", "0::/../../elsewhere")
    write(tmp_path, "proc/self/mountinfo", "30 23 0:26 /../.. /sys/fs/cgroup ro - cgroup2 cgroup rw")
    group_v2(tmp_path, "", memory_max=GIB, memory_current=0)
    assert [limit.limit_bytes for limit in ControlGroups(tmp_path).memory_limits()] == [GIB]


def test_no_file_outside_the_mount_is_read(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/../other")
    write(tmp_path, "proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw")
    group_v2(tmp_path, "", memory_max=GIB, memory_current=0)
    group_v2(tmp_path, "/../other", memory_max=MIB, memory_current=0)
    assert [limit.limit_bytes for limit in ControlGroups(tmp_path).memory_limits()] == [GIB]


def test_version_1_is_read_below_its_own_mount(tmp_path: Path) -> None:
    """As docker without a group namespace shows it: the mount shows our group at its top."""
    meminfo(tmp_path, 32 * GIB, 20 * GIB)
    write(tmp_path, "proc/self/cgroup", "9:name=systemd:/docker/ab\n4:cpu,cpuacct:/docker/ab\n3:memory:/docker/ab")
    write(
        tmp_path,
        "proc/self/mountinfo",
        "35 31 0:32 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "36 31 0:33 /docker/ab /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct",
    )
    memory = "sys/fs/cgroup/memory"
    write(tmp_path, f"{memory}/memory.limit_in_bytes", 2 * GIB)
    write(tmp_path, f"{memory}/memory.usage_in_bytes", GIB)
    write(tmp_path, f"{memory}/memory.stat", f"total_inactive_file {MIB}\nhierarchical_memory_limit {3 * GIB}")
    assert ControlGroups(tmp_path).memory_limits() == (MemoryLimit("/", 2 * GIB, GIB + MIB),)
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", 50000)
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100000)
    assert usable_cores(tmp_path) == 0.5


def test_version_1_tells_the_limit_of_groups_that_cannot_be_seen(tmp_path: Path) -> None:
    memory = "sys/fs/cgroup/memory"
    write(tmp_path, f"{memory}/memory.limit_in_bytes", 2**63 - 4096)
    write(tmp_path, f"{memory}/memory.usage_in_bytes", GIB)
    assert ControlGroups(tmp_path).memory_limits() == ()
    write(tmp_path, f"{memory}/memory.stat", f"hierarchical_memory_limit {3 * GIB}")
    assert ControlGroups(tmp_path).memory_limits() == (MemoryLimit("/", 3 * GIB, 2 * GIB),)


def test_the_least_share_of_time_on_the_way_up_counts(unified: Path) -> None:
    group_v2(unified, "/ai.slice", cpu_max="150000 100000")
    group_v2(unified, "/ai.slice/relevo.service", cpu_max="max 100000")
    assert usable_cores(unified) <= 1.5
    group_v2(unified, "/ai.slice/relevo.service", cpu_max="25000 100000")
    assert usable_cores(unified) == 0.25


def test_what_zfs_would_give_back_counts_as_free(tmp_path: Path) -> None:
    meminfo(tmp_path, 32 * GIB, 4 * GIB)
    write(
        tmp_path,
        "proc/spl/kstat/zfs/arcstats",
        f"12 1 0x01 147 39984 8105 7130\nname type data\nc_min 4 {GIB}\nc_max 4 {16 * GIB}\nsize 4 {11 * GIB}",
    )
    memory = host_memory(tmp_path)
    assert memory is not None and memory.zfs_cache_bytes == 10 * GIB
    host = HostDevice(root=tmp_path)
    assert host.read().free_bytes == 14 * GIB and "10.0 GiB are ZFS's cache" in host.tells
    write(tmp_path, "proc/spl/kstat/zfs/arcstats", f"size 4 {MIB}\nc_min 4 {GIB}")
    assert host.read().free_bytes == 4 * GIB


def test_the_machines_or_our_groups_pressure_is_told_whichever_is_more(unified: Path) -> None:
    host = HostDevice(root=unified)
    assert host.pressure() is None and "does not tell how hard memory is pressed" in host.tells
    write(unified, "proc/pressure/memory", "some avg10=12.50 avg60=1 total=9\nfull avg10=1.25 avg60=0 total=3")
    pressure = host.pressure()
    assert pressure is not None and (pressure.some_percent, pressure.full_percent) == (12.5, 1.25)
    group_v2(unified, "/ai.slice/relevo.service", memory_pressure="some avg10=3.0 x=1\nfull avg10=2.5 x=1")
    pressure = host.pressure()
    assert pressure is not None and (pressure.some_percent, pressure.full_percent) == (12.5, 2.5)


def test_a_kill_in_our_group_is_told_once_and_old_ones_never(unified: Path) -> None:
    group_v2(unified, "/ai.slice/relevo.service", memory_events="low 0\nhigh 0\nmax 3\noom 2\noom_kill 2")
    write(unified, "proc/vmstat", "nr_free_pages 5\noom_kill 7")
    host = HostDevice(root=unified, clock=lambda: 1.0)
    host.read()
    assert host.events() == ()
    group_v2(unified, "/ai.slice/relevo.service", memory_events="low 0\nhigh 0\nmax 3\noom 2\noom_kill 3")
    write(unified, "proc/vmstat", "nr_free_pages 5\noom_kill 8")
    host.read()
    assert host.events() == (
        DeviceEvent(
            DeviceEventKind.MEMORY_KILL,
            "oom_kill",
            "The kernel killed one process of our group for want of memory.",
            1.0,
        ),
    )
    write(unified, "proc/vmstat", "nr_free_pages 5\noom_kill 10")
    host.read()
    (event,) = host.events()
    assert event.code == "vmstat oom_kill" and "killed 2 processes on this machine" in event.sentence
    host.read()
    assert host.events() == ()


def test_a_limit_that_is_met_all_the_time_is_told_once_a_minute(unified: Path) -> None:
    now = [0.0]
    host = HostDevice(root=unified, clock=lambda: now[0])
    told = []
    for step in range(150):
        group_v2(unified, "/ai.slice", memory_events=f"high 0\nmax {step * 100}\noom 0\noom_kill 0")
        host.read()
        told += host.events()
        now[0] += 1.0
    assert [e.code for e in told] == ["max"] * 3
    assert [e.at for e in told] == [1.0, 1.0 + LIMIT_TOLD_EVERY_S, 1.0 + 2 * LIMIT_TOLD_EVERY_S]


def test_version_1_counts_are_told_too(tmp_path: Path) -> None:
    meminfo(tmp_path, 32 * GIB, 4 * GIB)
    memory = "sys/fs/cgroup/memory"
    write(tmp_path, f"{memory}/memory.failcnt", 5)
    write(tmp_path, f"{memory}/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0")
    host = HostDevice(root=tmp_path)
    host.read()
    write(tmp_path, f"{memory}/memory.failcnt", 9)
    write(tmp_path, f"{memory}/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2")
    host.read()
    assert [e.code for e in host.events()] == ["oom_kill", "max"]


def test_events_nobody_takes_push_the_oldest_out_and_are_counted() -> None:
    box = EventBox(kept=2)
    events = [DeviceEvent(DeviceEventKind.INFORMATION, str(n), "", 0.0) for n in range(5)]
    for event in events:
        box.put(event)
    assert box.take() == tuple(events[-2:]) and box.lost == 3
    assert box.take() == ()


@given(st.dictionaries(st.sampled_from(FILES), st.one_of(st.binary(max_size=60), st.sampled_from(ODD)), max_size=8))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_that_say_nonsense_are_figures_not_known_and_never_an_error(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    root = tmp_path_factory.mktemp("tree")
    meminfo(root, 32 * GIB, 20 * GIB)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    host = HostDevice(root=root)
    for _ in range(2):
        reading = host.read()
        assert reading.free_bytes is not None and reading.total_bytes is not None
        assert 0 <= reading.free_bytes <= reading.total_bytes <= 32 * GIB
    host.pressure()
    host.events()
    assert host.tells and usable_cores(root) > 0
