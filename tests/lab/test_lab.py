"""The lab's arithmetic: traces, statistics, peaks, tables, documents."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from benchmarks.differences import difference, quantile
from benchmarks.judge import Target, judge, read_targets
from benchmarks.lab import delay, document, elastic, figures, real, rules, theory, traces
from benchmarks.results import Results, read

TINY = Path(__file__).with_name("tiny.json")
GPUS = (56, 36, 31, 15, 0, 0)


@pytest.mark.parametrize("name", traces.TRACES)
@pytest.mark.parametrize("samples", [10_000, 12_345])
def test_a_trace_uses_up_its_samples(name: str, samples: int) -> None:
    batches = traces.batches(name, samples, GPUS)
    assert sum(batches) == samples and min(batches) > 0
    assert batches == traces.batches(name, samples, GPUS)
    assert max(batches) <= traces.REFERENCE * traces.MOST


def test_traces_change_where_they_say() -> None:
    batches = traces.jump(96 * traces.REFERENCE * traces.MOST)
    assert set(batches) == {traces.REFERENCE, traces.REFERENCE * traces.MOST}
    assert sum(batch for batch in batches if batch == traces.REFERENCE) * 3 == sum(batches)
    levels = [batch // traces.LOCAL for batch in traces.doublings(100_000)[:-1]]
    assert list(dict.fromkeys(levels)) == [8, 16, 32, 64, 128] and levels[-1] == 8


def test_the_recorded_trace_is_played_twice_without_its_total_loss() -> None:
    batches = traces.spot(4 * 2 * sum(GPUS), GPUS)
    assert batches == tuple(4 * count for count in (*GPUS, *GPUS) if count)[: len(batches)]
    assert min(traces.synthetic_gpus()) == 0 and max(traces.synthetic_gpus()) == 56


def test_paired_differences_have_students_interval() -> None:
    found = difference({0: 1.0, 1: 2.0, 2: 4.0, 9: 5.0}, {0: 0.0, 1: 0.0, 2: 1.0, 7: 3.0})
    assert found is not None
    assert (found.mean, found.pairs, found.deviation) == (2.0, 3, 1.0)
    assert math.isclose(found.high - found.mean, 4.303 / math.sqrt(3), rel_tol=1e-4)
    assert difference({0: 1.0}, {1: 1.0}) is None
    single = difference({0: 1.0}, {0: 0.5})
    assert single is not None and single.low == -math.inf
    for degrees, wanted in ((10, 2.2281), (19, 2.0930), (23, 2.0687), (39, 2.0227)):
        assert math.isclose(quantile(degrees), wanted, abs_tol=1e-3)


def test_a_peak_is_the_worst_bin_after_a_rise() -> None:
    batches = [32] * 256 + [512] * 32
    (at,) = elastic.changes(batches)
    assert at == 8192
    losses = [0.5] * 16 + [0.6, 0.9, 0.5] + [0.4] * 13
    found = elastic.peak(losses, [at])
    assert found is not None and math.isclose(found, 1.8)
    assert elastic.changes([32, 512, 512, 32]) == [], "nothing to compare with, and a fall is no rise"
    assert elastic.peak(losses, []) is None


def test_the_rules_come_from_the_library() -> None:
    once, ramped = (rules.Follower(name, reference=32, momentum=0.9) for name in ("linear_at_once", "linear"))
    for _ in range(3):
        assert once.follow(32) == ramped.follow(32) == 1.0
    assert once.follow(512) == 16.0
    assert 1.0 <= ramped.follow(512) < 3.0
    assert [ramped.follow(512) for _ in range(100)][-1] == pytest.approx(16.0, rel=1e-3)
    assert rules.Follower("none", reference=32, momentum=0.9).follow(512) == 1.0


def test_shares_of_the_delay_study_use_up_whole_batches() -> None:
    subject = delay.SUBJECTS["cnn sgd"]
    assert delay.steady(subject, equal=False)[0] == (96, 96, 48, 16)
    assert delay.steady(subject, equal=True)[0] == (64, 64, 64, 64)
    away = delay.churn(subject)
    assert {sum(each) for each in away} == {subject.batch}
    assert any(0 in each for each in away)
    open_batches = [sum(each) for each in delay.floating(subject)]
    assert len(set(open_batches)) > 10 and sum(open_batches) <= subject.samples


def test_edges_are_where_the_polynomials_have_them() -> None:
    assert theory.derived_edge("momentum", 0.9) == pytest.approx(0.25, abs=0.005)
    assert theory.measured_edge("plain", 0.9, steps=7, rounds=300) == pytest.approx(0.1, abs=0.05)
    assert theory.recursion([16.0], [16.0], 0.9) == [pytest.approx(16 * (0.81 + 0.19 / 16))]


def test_points_are_judged_by_mean_and_by_the_lower_end() -> None:
    results = read(TINY)
    found = {
        kind: judge(
            results,
            (
                Target(
                    benchmark="elastic-accuracy",
                    kind=kind,
                    name="",
                    system="linear",
                    rivals=("fixed",),
                    model="cnn sgd",
                    acts=("jump",),
                    figure="accuracy",
                    at_least=-0.2,
                ),
            ),
        )[0]
        for kind in ("points", "points_low")
    }
    assert found["points"].met and not found["points_low"].met
    assert "jump -0.10" in found["points"].detail


def test_the_issues_targets_are_there_with_their_numbers() -> None:
    lab = [t for t in read_targets().target if t.benchmark in ("elastic-accuracy", "delay")]
    assert {t.at_least for t in lab if t.kind == "points"} == {-0.2, 0.3, -0.3, -0.1}
    assert {t.at_least for t in lab if t.kind == "points_low"} == {-0.2}
    assert {t.at_most for t in lab if t.kind == "bounded"} == {1.3, 0.0}


def test_tables_and_pictures_are_made_from_the_file_alone(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "tiny.json").write_bytes(TINY.read_bytes())
    text = "# Title\n\n<!-- table:tiny -->\nold\n<!-- /table -->\n![](results/tiny.svg)\nAfter.\n"
    (tmp_path / "results.md").write_text(text)
    first = document.publish(tmp_path / "results.md")
    made = (tmp_path / "results.md").read_text()
    picture = (results / "tiny.svg").read_bytes()
    assert "| linear, ramped | 86.90 (-0.10 [" in made and "old" not in made and made.endswith("After.\n")
    document.publish(tmp_path / "results.md")
    assert (tmp_path / "results.md").read_text() == made
    assert (results / "tiny.svg").read_bytes() == picture
    assert first == [tmp_path / "results.md", results / "tiny.svg"]


def test_the_published_document_says_what_its_results_say() -> None:
    text = document.DOCUMENT.read_text()
    assert document.written(text, document.DOCUMENT.parent / "results") == text
    assert set(figures.DRAWN) == {"elastic-accuracy", "delay", "scaling-theory", "chaos"}


def test_results_of_the_lab_survive_the_file() -> None:
    results = read(TINY)
    assert isinstance(results, Results) and results.curves[0].figure == "batch"
    assert results.by_seed("linear", "cnn sgd", "jump", "accuracy") == {0: 86.9, 1: 86.8, 2: 87.0}


def test_selections_name_what_is_unknown() -> None:
    assert elastic.selection(["sgd", "jump"]).traces == ("jump",)
    assert delay.selection(["batchnorm"]).subjects == ("batchnorm sgd",)
    assert delay.selection(["cnn", "adamw"]).subjects == ("cnn adamw",)
    assert theory.selection(["edge"]) == ("edge",)
    for choose in (elastic.selection, delay.selection, theory.selection):
        with pytest.raises(ValueError, match="unknown in --only: nothing"):
            choose(["nothing"])


def test_how_far_a_run_is_comes_from_the_lines_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert real.Progress.of(path) == real.Progress()
    era = '{"kind":"era","era":%d,"roster":[%s],"crc":"0"}\n'
    rounds = '{"kind":"round","era":1,"samples_total":%d,"tickets":[[1,2]],"crc":"0"}\n'
    path.write_text(era % (1, '"w0","w1"') + rounds % 32 + rounds % 64 + '{"kind":"round","era":1,"sam')
    assert real.Progress.of(path) == real.Progress(64, 2)
    path.write_text(path.read_text() + "\n" + era % (2, '"w1"') + rounds % 96)
    assert real.Progress.of(path) == real.Progress(96, 1)
