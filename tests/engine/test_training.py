"""Training a Forecast: what it learns from, that it learns, that it may be killed, and what it leaves behind."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("triton", reason="the engine's kernels need triton")

import torch
from torch import Tensor

from sparda.engine.errors import SpardaError
from sparda.engine.forecast_file import read_forecast
from sparda.engine.pooling import free_blocks, pooled
from sparda.engine.prefill import prefill
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.training import targets as chunked
from sparda.engine.training.config import Student, Training
from sparda.engine.training.forecast import ForecastRows
from sparda.engine.training.found import trained_forecasts, trained_scorer
from sparda.engine.training.judge import judge
from sparda.engine.training.scorer import ScorerRows
from sparda.engine.training.targets import Targets, Teacher
from sparda.engine.training.trainer import StepLog, Trainer
from sparda.engine.training.walk import LayerView, walk
from sparda.engine.weights import Weights, proxy_rows, random_weights, rope_table
from sparda.kernels.forecast_loss import forecast_loss_reference

# Threads that wait for one another take longer than what there is to do on tensors this small.
torch.set_num_threads(1)

SHAPE = ModelShape(
    "tiny", layers=3, d_model=48, heads=6, kv_heads=2, head_dim=16, ffn=64, vocab=97, max_context=512, value_bytes=4
)
SPEC = SparseSpec(block=16, kernel=8, stride=4, init_blocks=1, local_blocks=1)
TRAINING = Training(steps=4, batch=2, learning_rate=3e-3, top_k=6, save_every=2)
STUDENTS = (Student(1), Student(2, heads=2), Student(0, begin="uniform"))


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here cuts the power: waiting for the disk is most of what a checkpoint takes."""
    monkeypatch.setattr(os, "fsync", lambda _file: None)


@functools.cache
def weights() -> Weights:
    return random_weights(SHAPE, "cpu", seed=3)


@functools.cache
def sequences(count: int = 3, length: int = 170) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, SHAPE.vocab, (length,), generator=generator) for _ in range(count)]


def trainer(out: Path | None = None, training: Training = TRAINING, scorer: bool = False) -> Trainer:
    own = ScorerRows.begun(weights(), SPEC, 1, TRAINING.top_k) if scorer else None
    return Trainer(weights(), SPEC, training, STUDENTS, sequences(), out, own)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A training with a scorer that nothing interrupted; its folder is only read."""
    made = trainer(tmp_path_factory.mktemp("whole"), scorer=True)
    made.run()
    return made


def views() -> list[LayerView]:
    return list(walk(weights(), sequences()[0], chunk=64))


def test_a_walk_meets_the_keys_that_a_prefill_leaves() -> None:
    found = views()
    kept = prefill(weights(), sequences()[0])
    assert len(found) == SHAPE.layers
    for view, keys in zip(found, kept.keys, strict=True):
        torch.testing.assert_close(view.keys, keys, rtol=1e-4, atol=1e-5)


def test_a_sequence_that_the_model_does_not_take_is_refused() -> None:
    for length in (1, 513):
        with pytest.raises(SpardaError, match="trains on 2 to 512"):
            next(walk(weights(), torch.zeros(length, dtype=torch.int64)))


def test_targets_do_not_depend_on_where_chunks_end() -> None:
    teacher = Teacher.of(views()[1], SPEC, 6)
    whole = teacher.targets(0, 170)
    parts = [teacher.targets(a, b) for a, b in ((0, 50), (50, 51), (51, 170))]
    torch.testing.assert_close(torch.cat([p.teacher for p in parts], 1), whole.teacher, rtol=1e-5, atol=1e-7)
    assert torch.equal(torch.cat([p.retained for p in parts], 1), whole.retained)


def test_a_teacher_retains_as_many_free_blocks_as_top_k_leaves_and_none_that_is_forced() -> None:
    retained = Teacher.of(views()[1], SPEC, 6).targets(0, 170).retained
    free = free_blocks(SPEC, torch.arange(170), 11)
    assert not bool((retained.bool() & ~free).any())
    expected = free.sum(-1).clamp(max=6 - SPEC.forced)
    assert torch.equal(retained.sum(-1), expected.expand(2, -1).to(retained.sum(-1).dtype))


def test_a_block_scores_the_best_key_that_begins_in_it_or_just_before() -> None:
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.9, 0.4, 0.1, 0.1, 0.2, 0.5]])
    assert pooled(scores, 4, 4).tolist() == [pytest.approx([0.9, 0.9, 0.5, -torch.inf])]


def plain_loss(rows: ForecastRows) -> Tensor:
    """The mean loss over layers, KV heads and queries, in one piece."""
    cos, sin = rope_table(SHAPE, 170, "cpu")
    seen, total = views(), torch.zeros(())
    for view in seen:
        teacher = Teacher.of(view, SPEC, 6)
        t = teacher.targets(0, 170)
        f = rows.queries(view.layer, seen[rows.source(view.layer)].inputs, cos, sin)
        loss = forecast_loss_reference(f, teacher.compressed, t.teacher, t.retained, 0, stride=4, per_block=4)
        total = total + loss.mean() / SHAPE.layers
    return total


def test_a_step_follows_the_gradient_of_the_whole_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "TEACHER_BYTES", 4 * 2 * 41 * 33)  # 33 queries at a time
    one = Trainer(weights(), SPEC, replace(TRAINING, batch=1), STUDENTS, sequences()[:1])
    one._optimize()
    for rows in one.rows:
        fresh = ForecastRows.begun(weights(), rows.student, TRAINING.seed)
        (plain_loss(fresh) * SHAPE.layers).backward()
        whole = torch.cat([p.grad.flatten() for p in fresh.named.values() if p.grad is not None])
        norm = float(whole.norm())
        clipped = whole * min(1.0, TRAINING.clip / (norm + 1e-6))
        own = torch.cat([p.grad.flatten() for p in rows.named.values() if p.grad is not None])
        torch.testing.assert_close(own, clipped, rtol=1e-3, atol=1e-6)


def test_training_brings_every_students_loss_down() -> None:
    work = trainer(training=replace(TRAINING, steps=25), scorer=True)
    seen: list[StepLog] = []
    work.run(seen.append)
    for name in ("d1-h1", "d2-h2", "d0-h1-uniform", "scorer-1"):
        assert seen[-1].losses[name] < 0.9 * seen[0].losses[name], name


def test_the_frozen_model_is_as_it_was() -> None:
    before = [w.fused.clone() for w in weights().layers]
    trainer(training=replace(TRAINING, steps=1)).run()
    assert all(torch.equal(a, w.fused) for a, w in zip(before, weights().layers, strict=True))


class KilledError(Exception):
    pass


@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_a_killed_training_ends_as_if_it_had_not_been_killed(tmp_path: Path, whole: Trainer, killed_at: int) -> None:
    def kill(log: StepLog) -> None:
        if log.step == killed_at:
            raise KilledError

    with pytest.raises(KilledError):
        trainer(tmp_path / "cut", scorer=True).run(kill)
    again = trainer(tmp_path / "cut", scorer=True)
    assert again.step == killed_at // 2 * 2
    again.run()
    for a, b in zip(whole.parts, again.parts, strict=True):
        for name in a.named:
            assert torch.equal(a.named[name], b.named[name]), (a.name, name)
    assert [(log.step, log.losses) for log in again.log] == [(log.step, log.losses) for log in whole.log]


def test_a_training_that_lost_one_students_last_checkpoint_goes_on_from_the_one_before(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    (tmp_path / "d2-h2" / "ckpt-4.pt").unlink()
    assert trainer(tmp_path).step == 2


def test_another_training_is_not_gone_on_with(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    with pytest.raises(SpardaError, match=r"another training \(learning_rate 0.003 then, 0.001 now\)"):
        trainer(tmp_path, replace(TRAINING, learning_rate=1e-3))
    longer = trainer(tmp_path, replace(TRAINING, steps=6))
    assert longer.step == 4


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    file = tmp_path / "d1-h1" / "ckpt-4.pt"
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(SpardaError, match=r"ckpt-4\.pt: cannot be read .* earlier one"):
        trainer(tmp_path)


def test_a_damaged_log_is_named_and_may_be_removed(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(SpardaError, match=r"log\.jsonl: is damaged .* remove it"):
        trainer(tmp_path)
    (tmp_path / "log.jsonl").unlink()
    assert trainer(tmp_path).step == 4


def test_a_checkpoint_of_other_sizes_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    wide = random_weights(replace(SHAPE, d_model=64), "cpu", seed=3)
    with pytest.raises(SpardaError, match=r"ckpt-4\.pt: holds other tensors"):
        Trainer(wide, SPEC, TRAINING, STUDENTS, sequences(), tmp_path)


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    trainer(tmp_path, replace(TRAINING, steps=6, save_every=1, keep=2)).run()
    assert sorted(f.name for f in (tmp_path / "d1-h1").iterdir()) == ["ckpt-5.pt", "ckpt-6.pt"]


def test_a_checkpoint_is_a_forecast_in_the_public_form(whole: Trainer) -> None:
    assert whole.out is not None
    forecast = read_forecast(whole.out / "d1-h1")
    forecast.check_fits(SHAPE, 1)
    assert forecast.step == 4
    assert torch.equal(forecast.rows["forecast"][1], whole.rows[0].forecast[1])
    # Two heads per KV head are no Forecast that the engine decodes with.
    with pytest.raises(SpardaError, match="that are not"):
        read_forecast(whole.out / "d2-h2").check_fits(SHAPE, 2)


def test_the_first_layers_choose_for_themselves() -> None:
    rows = ForecastRows.begun(weights(), Student(2))
    assert [rows.source(layer) for layer in range(3)] == [0, 1, 0]
    assert (sorted(rows.forecast), sorted(rows.current)) == ([0], [0, 1])


def test_a_forecast_begins_as_the_untrained_proxy_of_its_target() -> None:
    rows = ForecastRows.begun(weights(), Student(1))
    torch.testing.assert_close(rows.forecast[1].detach(), proxy_rows(weights(), 2).float())
    torch.testing.assert_close(rows.current[0].detach(), proxy_rows(weights(), 0).float())


@pytest.mark.parametrize("heads", [2, 4])
def test_no_two_heads_of_a_kv_head_begin_alike(heads: int) -> None:
    parts = ForecastRows.begun(weights(), Student(1, heads)).forecast[0].detach().view(2, heads, -1)
    for i in range(heads):
        for j in range(i):
            assert float((parts[:, i] - parts[:, j]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"keep": 1}, "give 2 or more"),
        ({"learning_rate": 2.0}, "between 0 and 1"),
        ({"schedule": "step"}, "allowed are constant, cosine"),
        ({"steps": 20, "warmup": 3}, "a tenth of 20 steps"),
    ],
)
def test_an_impossible_training_is_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(SpardaError, match=message):
        Training(**given)  # type: ignore[arg-type]


def test_the_rate_rises_in_a_line_then_stays_or_falls() -> None:
    constant = Training(steps=100, warmup=10, learning_rate=1e-3)
    assert [constant.rate(0), constant.rate(9), constant.rate(99)] == pytest.approx([1e-4, 1e-3, 1e-3])
    falling = replace(constant, schedule="cosine")
    assert falling.rate(10) == pytest.approx(1e-3)
    assert falling.rate(99) < 1e-5


def test_training_raises_the_recall_of_its_teachers_blocks() -> None:
    work = trainer(training=replace(TRAINING, steps=15, learning_rate=1e-2))
    before = judge(weights(), SPEC, 6, [ForecastRows.begun(weights(), s) for s in STUDENTS], sequences())
    work.run()
    after = judge(weights(), SPEC, 6, work.rows, sequences())
    for name in before:
        assert after[name].recall > before[name].recall + 0.01, name
        assert after[name].loss < before[name].loss, name


def test_a_forecast_that_is_its_teacher_catches_every_block() -> None:
    view = views()[0]
    teacher = Teacher.of(view, SPEC, 6)
    # With one query head a KV head, and the teacher on the deployed grid, the two scores are the same.
    alone = replace(view, queries=view.queries[::3].contiguous())
    own = Teacher(alone, SPEC, 6, teacher.compressed, teacher.fine)
    probable = torch.einsum("hqd,hcd->hqc", alone.queries, teacher.compressed) * SHAPE.head_dim**-0.5
    t = torch.arange(170)
    seen = probable.masked_fill(torch.arange(41) * 4 > t[:, None], -torch.inf).softmax(-1)
    targets = Targets(0, seen, own._retained(seen, 0))
    recall = own.recall(alone.queries, targets)
    assert bool((recall[~recall.isnan()] == 1).all())
    assert bool(recall[:, :64].isnan().any())


def test_what_a_training_left_is_found_by_lookahead_and_heads(whole: Trainer) -> None:
    assert whole.out is not None
    found = trained_forecasts(whole.out, SHAPE)
    # Students that began otherwise are for comparing, not for choosing.
    assert sorted(found) == [(1, 1), (2, 2)]
    assert torch.equal(found[2, 2].rows["forecast"][0], whole.rows[1].forecast[0])
    layer, scorer = trained_scorer(whole.out, SHAPE) or (0, None)
    assert whole.scorer is not None
    assert scorer is not None
    assert layer == 1
    assert torch.equal(scorer.hidden, whole.scorer.hidden)


def test_one_forecast_looks_as_far_ahead_as_its_name_says_and_its_heads_are_counted(tmp_path: Path) -> None:
    trainer(tmp_path, replace(TRAINING, steps=1)).run()
    assert list(trained_forecasts(tmp_path / "d1-h1", SHAPE)) == [(1, 1)]
    assert list(trained_forecasts(tmp_path / "d2-h2", SHAPE)) == [(2, 2)]
    assert list(trained_forecasts(tmp_path / "d1-h1" / "ckpt-1.pt", SHAPE)) == [(1, 1)]
    assert trained_scorer(tmp_path, SHAPE) is None


def test_a_forecast_is_checked_by_its_heads_and_a_folder_of_none_is_named(tmp_path: Path, whole: Trainer) -> None:
    assert whole.out is not None
    wide = trained_forecasts(whole.out, SHAPE)[2, 2]
    wide.check_fits(SHAPE, 2, 2)
    with pytest.raises(SpardaError, match="trained on this model"):
        wide.check_fits(SHAPE, 2, 4)
    with pytest.raises(SpardaError, match="no such file or folder"):
        trained_forecasts(tmp_path / "nowhere", SHAPE)
