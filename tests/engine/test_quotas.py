"""Quotas of owners and of keys: what is over one is refused, says why, and works again once there is room."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest
import pytest_asyncio

from cloche import errors
from cloche.cli.usage import merge_usage
from cloche.config.sections import Quota, QuotaDefaults, QuotaOverride
from cloche.engine.builds.build import BuildPlan, BuildStep
from cloche.engine.engine import Engine
from cloche.engine.principal import set_current_principal
from cloche.engine.quotas import quotas
from cloche.engine.quotas.quotas import SLOW_CPUS, OwnerUsage, SlidingWindow
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.linux import cgroups
from cloche.model import GIB, MIB, Limits, Principal, SandboxSpec, new_id
from cloche.store.builds import TemplateBuild
from cloche.store.gateway import GatewayStore
from cloche.store.quotas import QuotaSubject

pytestmark = pytest.mark.asyncio(loop_scope="session")

T = TypeVar("T")
BUSY = "import time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass"


async def by_key(owner: str, key_id: str, work: Awaitable[T]) -> T:
    """What `work` comes to when somebody asks for it with that key."""

    async def act() -> T:
        set_current_principal(Principal(owner=owner, key_id=key_id))
        return await work

    return await asyncio.create_task(act())


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.02)


class Somebody:
    """An owner with quotas of their own."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.owner = new_id("o")
        self.boxes: list[Sandbox] = []

    async def may(self, key_id: str = "", **amounts: float | None) -> None:
        await self.engine.quotas.set(QuotaSubject(self.owner, key_id), msgspec.convert(amounts, QuotaOverride))

    async def box(self, key_id: str = "", **fields: object) -> Sandbox:
        spec = SandboxSpec(owner=self.owner, **fields)  # type: ignore[arg-type]
        box = await by_key(self.owner, key_id, self.engine.create(spec))
        self.boxes.append(box)
        return box


@pytest_asyncio.fixture(loop_scope="session")
async def somebody(engine: Engine) -> AsyncIterator[Somebody]:
    one = Somebody(engine)
    yield one
    await asyncio.gather(*(each.kill() for each in one.boxes))
    for tenant in [each for each in engine.quotas.overrides if each.owner == one.owner]:
        await engine.quotas.set(tenant, QuotaOverride())


# --- sandboxes and memory


async def test_one_sandbox_too_many_is_refused_until_another_has_ended(somebody):
    await somebody.may(sandboxes=1)
    first = await somebody.box()
    with pytest.raises(errors.QuotaExceeded, match=r"sandboxes .*1 of 1 .*kill one") as refused:
        await somebody.box()
    assert refused.value.retry_after_seconds is None  # time alone does not help
    await first.kill()
    await somebody.box()


async def test_many_at_once_are_no_more_than_one_after_another(somebody):
    await somebody.may(sandboxes=2)
    made = await asyncio.gather(*(somebody.box() for _ in range(6)), return_exceptions=True)
    assert sum(isinstance(each, Sandbox) for each in made) == 2
    assert sum(isinstance(each, errors.QuotaExceeded) for each in made) == 4


async def test_one_that_could_not_be_made_takes_no_place(somebody):
    await somebody.may(sandboxes=1)
    with pytest.raises(errors.VolumeNotFound):
        await somebody.box(volumes={"/mnt/x": "no-such-volume"})
    await somebody.box()


async def test_memory_is_that_which_sandboxes_may_use(somebody):
    await somebody.may(memory_bytes=GIB)
    await somebody.box(limits=Limits(memory_bytes=768 * MIB))
    with pytest.raises(errors.QuotaExceeded, match=r"memory_bytes .*768 MiB of 1 GiB"):
        await somebody.box(limits=Limits(memory_bytes=512 * MIB))
    await somebody.box(limits=Limits(memory_bytes=256 * MIB))


async def test_a_key_has_a_quota_within_its_owners(somebody):
    await somebody.may(sandboxes=3)
    await somebody.may("one", sandboxes=1)
    await somebody.box("one")
    with pytest.raises(errors.QuotaExceeded, match="of key one"):
        await somebody.box("one")
    await somebody.box("another")
    await somebody.box("another")
    with pytest.raises(errors.QuotaExceeded, match=f"of owner {somebody.owner!r}"):
        await somebody.box("another")


async def test_one_that_is_paused_on_a_disk_takes_no_place_and_gets_one_when_it_is_woken(somebody, engine):
    await somebody.may("maker", sandboxes=1)
    first = await somebody.box("maker")
    await engine.pause(first.id, somebody.owner, memory=False)
    second = await somebody.box("maker")
    with pytest.raises(errors.QuotaExceeded, match="of key maker"):
        await engine.resume(first.id, somebody.owner)  # by nobody's key
    assert (await engine.describe(first.id, somebody.owner)).state == "paused"
    await second.kill()
    woken = await engine.resume(first.id, somebody.owner)
    somebody.boxes.append(woken)
    assert woken.record.key_id == "maker"
    with pytest.raises(errors.QuotaExceeded, match="of key maker"):
        await somebody.box("maker")


async def test_forks_find_no_more_places_than_there_are(somebody, engine):
    await somebody.may(sandboxes=3)
    box = await somebody.box()
    made = await engine.fork(box.id, somebody.owner, 4)
    somebody.boxes += [each for each in made if isinstance(each, Sandbox)]
    assert sum(isinstance(each, errors.QuotaExceeded) for each in made) == 2


async def test_another_owner_is_not_concerned(somebody, engine):
    await somebody.may(sandboxes=0, executions_per_minute=0)
    box = await engine.create(SandboxSpec(owner=new_id("o")))
    assert (await box.context().execute("6*7").result()).text == "42"
    await box.kill()


async def test_a_lifetime_is_shortened_and_cannot_be_renewed_beyond_the_quota(somebody):
    await somebody.may(lifetime_seconds=60)
    for asked in (None, 3600.0, 20.0):
        box = await somebody.box(lifetime_seconds=asked)
        assert round(box.record.deadline_at - box.record.created_at) == min(asked or 60, 60)
        box.renew(3600)
        assert box.record.deadline_at - box.record.created_at < 61


# --- executions


async def test_executions_and_commands_count_and_are_refused_before_anything_runs(somebody):
    await somebody.may(executions_per_minute=3)
    box = await somebody.box()
    await box.context().execute("a = 1").result()
    await box.commands.run("true")
    await box.commands.launch(["/bin/true"])
    with pytest.raises(errors.QuotaExceeded, match=r"executions_per_minute .*3 of 3 .*wait \d+ s") as refused:
        box.context().execute("a = 2")
    assert 0 < refused.value.retry_after_seconds <= 60
    with pytest.raises(errors.QuotaExceeded):
        await box.commands.run("true")
    await somebody.may(executions_per_minute=None)
    assert (await box.context().execute("a").result()).text == "1"


async def test_a_zero_quota_gives_no_retry_time(somebody):
    box = await somebody.box()
    await somebody.may(executions_per_minute=0)
    with pytest.raises(errors.QuotaExceeded, match="ask the operator for some") as refused:
        box.context().execute("1")
    assert refused.value.retry_after_seconds is None


async def test_refused_requests_are_not_counted(somebody, engine):
    await somebody.may(executions_per_minute=1)
    box = await somebody.box()
    box.context().execute("1")
    for _ in range(5):
        with pytest.raises(errors.QuotaExceeded):
            box.context().execute("1")
    assert (await engine.quotas.usage(somebody.owner)).executions_last_minute == 1


async def test_with_a_sandboxes_own_token_the_key_counts_that_made_it(somebody):
    await somebody.may("maker", executions_per_minute=1)
    box = await somebody.box("maker")
    assert box.record.key_id == "maker"
    box.context().execute("1")  # nobody is known to ask here
    with pytest.raises(errors.QuotaExceeded, match="of key maker"):
        box.context().execute("1")

    async def use() -> None:
        box.context().execute("1")

    await by_key(somebody.owner, "another", use())  # which has no quota
    with pytest.raises(errors.QuotaExceeded, match="of key maker"):
        await by_key("a stranger", "another", use())


# --- CPU


async def test_an_owner_out_of_cpu_starts_nothing_for_a_while(somebody, engine):
    await somebody.may(cpu_seconds_per_hour=0.2)
    box = await somebody.box("busy")
    await box.context().execute(BUSY).result()
    await box.kill()
    used = await engine.quotas.usage(somebody.owner)
    assert used.cpu_seconds_last_hour >= 0.25
    assert used.cpu_seconds >= 0.25
    assert [(each.key_id, each.cpu_seconds_last_hour >= 0.25) for each in used.keys] == [("busy", True)]
    with pytest.raises(errors.QuotaExceeded, match="cpu_seconds_per_hour") as refused:
        await somebody.box()
    assert 0 < refused.value.retry_after_seconds <= 3600


async def test_background_programs_count(somebody, engine):
    box = await somebody.box()
    if box._cell.cpu_seconds() is None:
        pytest.skip("without a cgroup for it, the CPU of a sandbox that ends within seconds is what executions say")
    process = await box.commands.start(["python3", "-c", BUSY], background=True)
    await process.result()
    await box.kill()
    assert (await engine.quotas.usage(somebody.owner)).cpu_seconds_last_hour >= 0.25


async def test_running_programs_are_throttled_when_the_cpu_quota_is_used_up(somebody, engine):
    box = await somebody.box()
    if box._cell.cpu_seconds() is None or "cpu" in cgroups.probe_cgroups().missing:
        pytest.skip("without a cgroup for it, nobody measures or limits the CPU of a sandbox")
    process = await box.commands.start(["python3", "-c", "while True: pass"], background=True)
    await until(lambda: box._cell.cpu_seconds() > 0.2)
    await box.meter.latest_sample()  # which looks, if nobody has yet
    await somebody.may(cpu_seconds_per_hour=0.1)
    await until(lambda: engine.quotas.account(QuotaSubject(somebody.owner)).is_out_of_cpu(time.monotonic()))
    await engine.quotas.refresh()
    before = box._cell.cpu_seconds()
    await asyncio.sleep(1)  # the second in which CPU time is measured
    assert box._cell.cpu_seconds() - before < 0.5
    await somebody.may(cpu_seconds_per_hour=None)
    await until(lambda: box._cell.cpu_seconds() - before > 0.5)
    process.kill()


# --- what is stored


async def test_neither_a_snapshot_nor_a_pause_gives_cpu_back_that_is_used_up(somebody, engine):
    box = await somebody.box(limits=Limits(cpus=1.0))
    given = limits_of(box)
    await somebody.may(cpu_seconds_per_hour=0)
    assert given()[-1].cpus == SLOW_CPUS and given()[-1] == box.quota_lease.limits
    snapshot = await engine.snapshot(box.id, somebody.owner)
    assert [each.cpus for each in given()[-2:]] == [1.0, SLOW_CPUS]  # to save it, and then
    await engine.pause(box.id, somebody.owner)
    await engine.resume(box.id, somebody.owner)
    assert given()[-1].cpus == SLOW_CPUS
    await somebody.may()
    assert given()[-1] == box.limits
    await engine.snapshots.remove(snapshot.id, somebody.owner)


async def test_running_out_of_cpu_during_a_save_applies_afterwards(somebody):
    box = await somebody.box(limits=Limits(cpus=1.0))
    given = limits_of(box)
    with box.quota_lease.extra_room_to_save(MIB):
        await somebody.may(cpu_seconds_per_hour=0)
        assert given()[-1].cpus == 1.0 and given()[-1].memory_bytes == box.limits.memory_bytes + MIB
    assert given()[-1].cpus == SLOW_CPUS and given()[-1].memory_bytes == box.limits.memory_bytes


async def test_a_cell_that_cannot_be_slowed_down_keeps_no_other_from_it(somebody, engine, monkeypatch):
    first, second = await somebody.box(), await somebody.box()

    def fail(limits: Limits) -> None:
        raise OSError(errno.ENODEV, "it ends just now")

    for box in (first, second):
        monkeypatch.setattr(box._cell, "set_limits", fail)
    await somebody.may(cpu_seconds_per_hour=0)
    assert {box.quota_lease.limits.cpus for box in (first, second)} == {SLOW_CPUS}
    monkeypatch.undo()


def limits_of(box: Sandbox) -> Callable[[], list[Limits]]:
    """All that were set for its cell from now on, also on a host without cgroups."""
    given: list[Limits] = []
    set_limits = box._cell.set_limits

    def note(limits: Limits) -> None:
        given.append(limits)
        set_limits(limits)

    box._cell.set_limits = note  # type: ignore[method-assign]
    return lambda: given


# --- what is stored


async def test_a_sandbox_that_may_not_be_kept_is_not_written_again_and_again(somebody, engine, monkeypatch):
    written = images_written(engine, monkeypatch)
    box = await somebody.box()
    await somebody.may(stored_bytes=0)
    with pytest.raises(errors.QuotaExceeded, match="stored_bytes"):
        await engine.pause(box.id, somebody.owner)
    assert written == []  # there was no room for anything
    await somebody.may(stored_bytes=1)
    for _ in range(3):
        with pytest.raises(errors.QuotaExceeded, match="stored_bytes"):
            await engine.pause(box.id, somebody.owner)
    assert len(written) == 1  # what did not fit then is not tried at once
    await somebody.may()
    await engine.pause(box.id, somebody.owner)
    assert box.record.state == "paused"


async def test_between_tries_to_pause_one_more_and_more_time_passes(somebody, engine):
    box = await somebody.box()
    waits = [engine.pauses._retry_seconds(box) for _ in range(7)]
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]


async def test_runs_that_go_on_by_themselves_need_room_to_be_stored(somebody, engine):
    box = await somebody.box()
    await somebody.may(stored_bytes=0)
    with pytest.raises(errors.QuotaExceeded, match="stored_bytes"):
        await engine.runs.start(box, "default", box.context().execute("1"))
    assert await engine.runs.list(somebody.owner) == []
    await somebody.may(stored_bytes=GIB)
    run = await engine.runs.start(box, "default", box.context().execute("6*7"))
    assert (await engine.runs.result(run.id, somebody.owner)).text == "42"


async def test_kept_answers_and_conversations_need_room_to_be_stored(somebody, engine, tmp_path):
    said = {"id": "msg_1", "type": "message", "role": "user", "content": "x" * 1000}
    async with GatewayStore(tmp_path, 1.0) as gateway_store:
        gateway_store.guard(engine.quotas.check_stored)
        await somebody.may(stored_bytes=500)
        with pytest.raises(errors.QuotaExceeded, match="stored_bytes"):
            await gateway_store.conversations.create(somebody.owner, {}, [said])
        made = await gateway_store.conversations.create(somebody.owner, {}, [])
        for work in (
            gateway_store.conversations.add(made.id, [said], (), str),
            gateway_store.conversations.check_room(made.id, [said]),
        ):
            with pytest.raises(errors.QuotaExceeded, match="stored_bytes"):
                await work
        assert await gateway_store.conversations.items(made.id) == []
        await gateway_store.responses.check_allowed(somebody.owner)
        await somebody.may(stored_bytes=0)
        with pytest.raises(errors.QuotaExceeded, match="stored_bytes"):
            await gateway_store.responses.check_allowed(somebody.owner)


def images_written(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of those that are from now on."""
    written: list[str] = []
    save = engine._images.save

    async def noted(*args: Any, **fields: Any) -> Any:
        saved = await save(*args, **fields)
        written.append(saved.id)
        return saved

    monkeypatch.setattr(engine._images, "save", noted)
    return written


# --- builds


async def built(engine: Engine, owner: str, *steps: BuildStep, key_id: str = "") -> TemplateBuild:
    template, build = await engine.builds.request(f"t{new_id('x')}", (), owner, Limits(memory_bytes=256 * MIB))
    starting = engine.builds.start(build, BuildPlan(base="python", steps=steps, force=True))
    await (by_key(owner, key_id, starting) if key_id else starting)
    while (found := await engine.builds.build(template, build.id)).state in ("waiting", "building"):
        await asyncio.sleep(0.02)
    await engine.builds.remove(template)
    return found


@pytest.mark.parametrize("quota", ["sandboxes", "memory_bytes", "executions_per_minute"])
@pytest.mark.parametrize("key_id", ["", "builder"])
async def test_a_build_counts_against_owner_and_key(somebody, engine, quota, key_id):
    await somebody.may(key_id, **{quota: 0})
    failed = await built(engine, somebody.owner, BuildStep(kind="RUN", args=("true",)), key_id=key_id)
    assert failed.state == "error" and f"the quota {quota}" in (failed.reason or "")
    account = engine.quotas.account(QuotaSubject(somebody.owner, key_id))
    assert account.sandboxes == account.memory_bytes == account.minute.sum(time.monotonic()) == 0


async def test_a_builds_usage_is_counted_and_its_slots_are_released(somebody, engine):
    account = engine.quotas.account(QuotaSubject(somebody.owner))
    steps = [BuildStep(kind="RUN", args=("true",))] * 2 + [BuildStep(kind="ENV", args=("A", "$PATH"))]
    done = await built(engine, somebody.owner, *steps)
    assert done.state == "ready"
    assert account.minute.sum(time.monotonic()) == 2
    assert account.sandboxes == account.memory_bytes == 0


async def test_stored_bytes_have_a_quota_and_removing_some_makes_room(somebody, engine):
    box = await somebody.box()
    await box.files.write("/mnt/data/large", b"x" * MIB)
    snapshot = await engine.snapshot(box.id, somebody.owner)
    used = await engine.quotas.usage(somebody.owner)
    assert used.stored_bytes == used.stored["snapshots"] == snapshot.bytes > MIB
    await somebody.may(stored_bytes=snapshot.bytes + MIB)
    with pytest.raises(errors.QuotaExceeded, match=r"stored_bytes .*remove"):
        await engine.snapshot(box.id, somebody.owner)
    with pytest.raises(errors.QuotaExceeded):
        await engine.pause(box.id, somebody.owner)
    assert (await box.context().execute("6*7").result()).text == "42"  # it runs as before
    with pytest.raises(errors.QuotaExceeded):
        await engine.volumes.create("v", somebody.owner)  # it can hold a GiB
    await engine.snapshots.remove(snapshot.id, somebody.owner)
    await engine.snapshot(box.id, somebody.owner)


# --- who may how much


async def test_a_quota_of_its_own_overrides_the_defaults(engine):
    defaults = QuotaDefaults(owner=Quota(sandboxes=5, stored_bytes=GIB))
    assert QuotaOverride(sandboxes=7).apply_to(defaults.owner) == Quota(sandboxes=7, stored_bytes=GIB)
    assert QuotaOverride(sandboxes=None).apply_to(defaults.owner) == Quota(stored_bytes=GIB)
    assert QuotaOverride().apply_to(defaults.owner) == defaults.owner


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf")])
async def test_a_quota_is_a_number_that_can_be_one(amount):
    with pytest.raises(errors.InvalidRequest):
        QuotaOverride(cpu_seconds_per_hour=amount)


async def test_a_key_stores_nothing_of_its_own(somebody):
    with pytest.raises(errors.InvalidRequest, match="owner"):
        await somebody.may("a key", stored_bytes=1)


async def test_another_process_learns_of_a_quota_and_usage_is_kept(somebody, engine, config, opening):
    box = await somebody.box()
    await box.context().execute("1").result()
    await somebody.may(executions_per_minute=1, sandboxes=7)
    engine.quotas.save()
    async with opening(config) as other:
        assert other.quotas.quota_of(QuotaSubject(somebody.owner)).sandboxes == 7
        await somebody.may(sandboxes=8)
        await other.quotas.refresh()
        assert other.quotas.quota_of(QuotaSubject(somebody.owner)) == Quota(sandboxes=8)
        assert (await other.quotas.usage(somebody.owner)).executions == 1


async def test_cpu_counts_once_whichever_process_gave_it(somebody, engine, config, opening, monkeypatch):
    monkeypatch.setattr(quotas, "SAVE_USAGE_SECONDS", -1.0)  # whoever refreshes saves and recounts
    tenant = QuotaSubject(somebody.owner)

    def spend(of: Engine, cpu_seconds: float) -> None:
        of.quotas.account(tenant).spend_cpu(cpu_seconds, time.monotonic())

    async def told(of: Engine) -> OwnerUsage:
        return await of.quotas.usage(somebody.owner)

    spend(engine, 5.0)
    engine.quotas.save()
    async with opening(config) as other:
        assert merge_usage(await told(engine), await told(other)).cpu_seconds_last_hour == 5.0
        await somebody.may(cpu_seconds_per_hour=9)
        await other.quotas.try_refresh()
        other.quotas.account(tenant).check_cpu(time.monotonic())
        spend(other, 3.0)
        await other.quotas.try_refresh()
        other.quotas.account(tenant).check_cpu(time.monotonic())
        spend(engine, 1.0)
        await engine.quotas.try_refresh()
        with pytest.raises(errors.QuotaExceeded, match="9 of 9 seconds"):
            engine.quotas.account(tenant).check_cpu(time.monotonic())
        assert [(await told(each)).cpu_seconds_last_hour for each in (engine, other)] == [9.0, 9.0]
        assert merge_usage(await told(engine), await told(other)).cpu_seconds == 9.0


# --- windows


async def test_a_window_drops_old_usage_and_reports_when():
    window = SlidingWindow(60.0)
    for now in (1000.0, 1000.5, 1010.0):
        window.count(now)
    assert window.sum(1030.0) == 3
    assert window.wait_seconds(4, 1030.0) == 0
    assert window.wait_seconds(3, 1030.0) == 30.0  # the first two leave together
    assert window.wait_seconds(1, 1030.0) == 40.0
    assert (window.sum(1059.9), window.sum(1060.0), window.sum(1070.0)) == (3, 1, 0)
    window.count(5000.0)
    assert window.sum(5000.0) == 1


async def test_a_new_window_includes_earlier_usage():
    window = SlidingWindow(3600.0)
    window.add(7.0, 8000.0, 10_000.0)
    window.add(5.0, 6000.0, 10_000.0)  # too long ago
    assert window.sum(10_000.0) == 7.0
    assert window.sum(11_700.0) == 0
