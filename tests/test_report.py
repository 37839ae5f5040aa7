"""The report of a run, read back from the page that it writes."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from tokenizers import Tokenizer, models

from headway.cluster.page import visible
from headway.cluster.report import read_metrics, reported, write_report
from headway.cluster.report_plots import MAX_POINTS, plots
from headway.core import rollouts
from headway.core.errors import DataError

VOID = {"meta", "path", "use", "rect", "br", "link", "img"}


class Page(HTMLParser):
    """A page's tags, references, text, and text of each element; fails on tags that do not pair up."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.references, self.open, self.elements = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []
        self.text = self.of("body")[0]
        self.headlines = dict(zip(self.of("dt"), self.of("dd"), strict=True))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [
            value for name, value in attrs if name.rpartition(":")[2] in ("src", "href", "data")
        ]
        if tag != "meta":
            self.open.append((tag, []))
            self.elements.append(self.open[-1])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag
        self.handle_data(" ")

    def handle_data(self, data):
        for _, words in self.open:
            words.append(data)

    def of(self, tag):
        """Text of every element of this kind, white space as a browser shows it outside of pre."""
        return [" ".join("".join(words).split()) for name, words in self.elements if name == tag]


def record(version, **changes):
    return {
        "version": version,
        "time_s": 10.0 * version,
        "reward_mean": 0.5,
        "importance_ess_fraction": 0.9,
        "behavior_kl": 0.001,
        "engine_learner_kl": None,
        "clipped_fraction": 0.01,
        "no_signal_groups_fraction": 0.25,
        "truncated_fraction": 0.125,
        "entropy": 1.0,
        "loss": -0.0,
        "grad_norm": 1.0,
        "learning_rate": 1e-5,
        "masked_fraction": {"no_signal": 0.1},
        "lag": [0, 1],
        "lag_queue": [0, 0],
        "response_tokens": [3, 4, 5, 8],
        "trained_tokens": 20,
        "seconds": {
            "take": 0.5,
            "publish": 0.5,
            "total": 10.0,
            "unpack": 1.0,
            "forward_backward": 4.0,
            "optimizer": 2.0,
        },
        "waited_s": 2.0,
        "queue_groups": 1,
        "running_groups": 2,
        "engine_versions": [version - 1, None],
        "dropped": {},
        **changes,
    }


def run_folder(tmp_path, records, config=None):
    folder = tmp_path / "some-run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def response(group, sample, text, reward, *, versions=(0,), reason="wrong"):
    """One sampled response; every version sampled two tokens."""
    spans = [{"start": 2 * i, "end": 2 * i + 2, "version": version} for i, version in enumerate(versions)]
    length = 2 * len(versions)
    return {
        "rollout_id": f"{group}-{sample}",
        "group_id": group,
        "prompt_id": f"prompt-{group}",
        "sample_index": sample,
        "prompt_ids": [1],
        "response_ids": [2] * length,
        "loss_mask": [1] * length,
        "behavior_logprobs": [-1.0] * length,
        "version_spans": spans,
        "finish_reason": "stop",
        "truncated": False,
        "text": text,
        "reward": reward,
        "verdict_reason": reason,
    }


def store(folder, version, rows):
    table = rollouts.build(rows)
    table = table.replace_schema_metadata({**table.schema.metadata, b"version": str(version).encode()})
    rollouts.write_parquet(table, folder / "rollouts" / f"step-{version:06d}.parquet")


def read(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def test_headlines_are_those_of_the_records(tmp_path):
    # 20 steps: a tenth is 2. Rewards 0.00, 0.05, ..., 0.95: the first two average 0.025, the last two 0.925.
    # One step of the twenty has its second group at lag 3 instead of 1: mean lag (19 * 1 + 3) / 40 = 0.55.
    records = [record(v, reward_mean=0.05 * (v - 1), lag=[0, 3] if v == 7 else [0, 1]) for v in range(1, 21)]
    records[4]["importance_ess_fraction"] = 0.5  # mean (19 * 0.9 + 0.5) / 20 = 0.88
    config = {"run": {"name": "sums", "steps": 30}, "model": {"path": "small"}, "lag": {"max_version_lag": 3}}
    page = read(run_folder(tmp_path, records, config))
    assert page.headlines == {
        "Reward": "0.025 → 0.925 first → last 2 steps",
        "Groups at lag ≥ 1": "50.0 % of 40 trained",
        "Version lag": "0.55 / 3 mean / max, in steps",
        "Trained tokens/s": "2 400 tokens",  # 20 tokens in 10 s
        "ESS": "0.880 of tokens; lowest 0.500",
        "Waiting": "20.0 % of step time, for groups",
        "Framework overhead": "10.0 % neither waits nor computes",  # 1 - (2 + 1 + 4 + 2) / 10
    }
    assert page.text.startswith("sums small · 20 of 30 steps · 0:03:20 h · max version lag 3 Reward")
    assert page.tags.count("svg") == 13  # and one without values: these records hold no audit


def test_a_page_needs_nothing_from_outside_and_runs_nothing(tmp_path):
    folder = run_folder(
        tmp_path, [record(v) for v in range(1, 4)], {"data": {"source": "https://example.org/x"}}
    )
    store(folder, 1, [response(0, s, '<img src="http://example.org/a.png">', float(s)) for s in range(2)])
    page = read(folder)
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert all(reference.startswith("#") for reference in page.references)
    assert not re.search(r"url\((?!#)|@import|\bon\w+=", re.sub(r"<pre>.*?</pre>", "", html, flags=re.DOTALL))
    assert not {"script", "img", "iframe", "link", "object"} & set(page.tags)
    assert "default-src 'none'" in html
    assert '<meta name="viewport"' in html and "prefers-color-scheme: dark" in html
    ids = re.findall(r' id="([^"]*)"', html)
    assert {r[1:] for r in page.references} | set(re.findall(r"url\(#(\w+)\)", html)) <= set(ids)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_what_a_model_wrote_is_text(tmp_path):
    folder = run_folder(tmp_path, [record(1)])
    hostile = "</pre><script>alert(1)</script>\x1b[2J\x00\u202egnp.\r\nend"
    store(folder, 1, [response(0, 0, hostile, 1.0, reason="<b>"), response(0, 1, "\n&lt;", 0.0)])
    page = read(folder)
    assert "script" not in page.tags
    best, worst, _ = page.of("pre")
    assert best == "</pre><script>alert(1)</script>⟨U+001B⟩[2J⟨U+0000⟩⟨U+202E⟩gnp.⟨U+000D⟩ end"
    assert worst == "&lt;"
    assert "best · reward 1.000 · <b>" in page.text


def test_unseen_characters_are_written_out():
    assert visible("a\tb\nc\x7f\u200b\ufeffé 数 −") == "a⟨U+0009⟩b\nc⟨U+007F⟩⟨U+200B⟩⟨U+FEFF⟩é 数 −"


def test_best_and_worst_of_the_first_middle_and_last_batch(tmp_path):
    folder = run_folder(tmp_path, [record(v) for v in range(1, 6)])
    for version in (1, 2, 3, 5, 9):  # 9 belongs to steps that a resume undid
        rows = [
            response(g, s, f"v{version}g{g}s{s}", (3 * g + s) / 8, versions=(version - 1,))
            for g in range(3)
            for s in range(3)
        ]
        store(folder, version, rows)
    page = read(folder)
    assert page.of("h3") == ["Step 1", "Step 3", "Step 5"]
    # The best of the best two groups, the worst of the worst two.
    assert page.of("pre")[4:8] == ["v3g2s2", "v3g1s2", "v3g0s0", "v3g1s0"]
    assert page.text.count("9 responses to 3 prompts, mean reward 0.500: 9 wrong") == 3


def test_lag_is_counted_from_the_step_that_trained_the_group(tmp_path):
    # Version 4 ends a batch of two steps with one group each: group 0 was trained at learner version 2, group 1 at 3.
    folder = run_folder(
        tmp_path, [record(3), record(4)], {"learner": {"groups_per_step": 1, "steps_per_batch": 2}}
    )
    store(folder, 4, [response(g, s, f"g{g}", float(g), versions=(1, 2)) for g in range(2) for s in range(2)])
    page = read(folder)
    assert "reward 1.000 · wrong prompt prompt-1 · 4 tokens · v1 [0, 2), v2 [2, 4) · lag 2 g1" in page.text
    assert "reward 0.000 · wrong prompt prompt-0 · 4 tokens · v1 [0, 2), v2 [2, 4) · lag 1 g0" in page.text


def test_unscored_responses_are_counted_not_ranked(tmp_path):
    folder = run_folder(tmp_path, [record(1)])
    store(folder, 1, [response(0, s, "x", None, reason="timeout") for s in range(2)])
    page = read(folder)
    assert "2 responses to 1 prompts, mean reward –: 2 timeout" in page.text
    assert "article" not in page.tags


def test_a_long_response_loses_its_middle(tmp_path):
    folder = run_folder(tmp_path, [record(1)])
    store(folder, 1, [response(0, s, "a" * 5000 + "b" * 5000, float(s)) for s in range(2)])
    assert read(folder).of("pre")[0] == "a" * 2000 + " [… 6,000 characters left out …] " + "b" * 2000


def test_a_resume_undoes_the_steps_after_its_checkpoint(tmp_path):
    # Steps 1 to 4 in 40 s; a resume from version 2 does step 3 at second 15 of its own clock, and stops there.
    before = [record(v, reward_mean=0.1 * v) for v in range(1, 5)]
    again = record(3, reward_mean=0.9, time_s=15.0, dropped={"stale": 2, "straggler": 1})
    folder = run_folder(tmp_path, [*before, again])
    steps, duration_s, unreadable = read_metrics(folder / "metrics.jsonl")
    assert [(step["version"], step["reward_mean"]) for step in steps] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert (duration_s, unreadable) == (55.0, 0)
    page = read(folder)
    assert page.headlines["Reward"] == "0.100 → 0.900 first → last step"
    assert "trained 6 dropped: stale 2 dropped: straggler 1" in page.text


def test_a_resume_at_the_next_version_is_another_process(tmp_path):
    folder = run_folder(tmp_path, [record(1, time_s=30.0), record(2, time_s=40.0), record(3, time_s=12.0)])
    assert read_metrics(folder / "metrics.jsonl")[1] == 52.0


def test_lines_that_are_no_record_are_counted(tmp_path):
    folder = run_folder(tmp_path, [record(1)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"version": 2, "rewa\n[1]\n{"loss": 1}\n')
    page = read(folder)
    assert "Lines of metrics.jsonl that could not be read: 3." in page.text
    assert "1 steps" in page.text


@pytest.mark.parametrize(
    "only",
    [
        {"version": 1},
        dict.fromkeys(record(1), None) | {"version": 1},
        record(1, reward_mean=math.nan, behavior_kl=math.inf, grad_norm=None, lag=[None], response_tokens=[]),
    ],
    ids=["absent", "null", "not finite"],
)
def test_a_single_step_with_missing_values_makes_a_page(tmp_path, only):
    page = read(run_folder(tmp_path, [only], {"run": None, "lag": {"max_version_lag": None}}))
    assert page.headlines["Reward"] == "– → – first → last step"
    assert page.headlines["Version lag"] == "– / – mean / max, in steps"
    assert "No values." in page.text


def test_a_negative_zero_is_zero(tmp_path):
    folder = run_folder(tmp_path, [record(1, reward_mean=-0.0, entropy=-0.0, behavior_kl=-1e-12)])
    store(folder, 1, [response(0, s, "x", -0.0) for s in range(2)])
    page = read(folder)
    assert page.headlines["Reward"] == "0.000 → 0.000 first → last step"
    assert not re.search(r"(?<!\w)[-−]0(\.0*)?(?![\d.])", page.text)


def test_a_long_run_stays_a_small_file(tmp_path):
    steps = 4 * MAX_POINTS
    folder = run_folder(
        tmp_path, [record(v, reward_mean=v % 7 / 7, waited_s=v % 3) for v in range(1, steps + 1)]
    )
    page = read(folder)
    assert "A point stands for 4 steps." in page.text
    assert (folder / "report.html").stat().st_size < 300_000


@pytest.mark.parametrize("text", [None, "", "\n", "not json\n"])
def test_a_run_without_a_step_has_no_report(tmp_path, text):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"metrics\.jsonl holds no optimizer step"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_run_ends_as_it_does_also_without_a_report(tmp_path):
    folder = run_folder(tmp_path, [record(1)])
    store(folder, 1, [response(0, s, "x", 1.0) for s in range(2)])
    assert reported(folder) == f"report: {folder / 'report.html'}"
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    assert reported(folder).startswith("no report: [Errno ")
    next((folder / "rollouts").iterdir()).write_bytes(b"PAR1 cut off")
    assert "cannot be read" in reported(folder)


def test_corrections_and_lags_are_tables_of_means(tmp_path):
    def other(tokens, ess):
        return {"tokens": tokens, "responses": tokens / 2, "ess_fraction": ess}

    def weights(ess, largest):
        return {"mean": 1.0, "max": largest, "p99": 1.0, "ess_fraction": ess, "k1": 0.0, "k3": 0.5}

    records = [
        record(
            1,
            counterfactuals={"none": other(0.0, 1.0), "mis_token": other(0.1, 0.8)},
            by_lag={"0": weights(0.9, 1.5)},
        ),
        record(
            2,
            counterfactuals={"none": other(0.0, 1.0), "mis_token": other(0.3, 0.6)},
            by_lag={"0": weights(0.7, 2.5), "10": weights(0.5, 4.0)},
            audit={"length_ks": 0.125, "sampled_mean": 12.5, "trained_mean": 11.0},
        ),
    ]
    config = {"algorithm": {"correction": ["tis_token", "veto"]}}
    html = write_report(run_folder(tmp_path, records, config)).read_text()
    page = Page(html)
    assert "On in this run: tis_token, veto." in page.text
    assert "mis_token 20.00 % 10.00 % 0.700" in page.text
    assert "0 2 0.800 2.50 0.50000" in page.text and "10 1 0.500 4.00 0.50000" in page.text
    assert "mean tokens 12.5 / 11.0" in page.text and "(KS) 0.125" in page.text


def test_with_dynamic_sampling_the_reward_is_that_of_all_samples(tmp_path):
    records = [record(step, reward_mean=0.5, sampled_reward_mean=0.1 * step) for step in range(1, 9)]
    config = {"algorithm": {"dynamic_sampling": True}}
    page = Page(write_report(run_folder(tmp_path, records, config)).read_text())
    assert page.headlines["Reward"].startswith("0.100 → 0.800")
    assert "of all samples" in page.text and "of trained groups" in page.text


def heights(records, title):
    """By label of its layers, what the plot of this title shows at each step."""
    (plot,) = [plot for plot in plots(records, "reward_mean") if plot.title.startswith(title)]
    return {
        layer.label: (layer.high - (0 if layer.low is None else layer.low)).round(6).tolist()
        for layer in plot.layers
    }


def test_lag_is_split_into_its_phases():
    # (1 + 3) / 2 = 2 steps of lag, of which (1 + 0) / 2 while they waited
    records = [record(1, lag=[0, 0], lag_queue=[0, 0]), record(2, lag=[1, 3], lag_queue=[1, 0])]
    assert heights(records, "Version lag by phase") == {
        "generation": [0.0, 1.5],
        "queue": [0.0, 0.5],
        "largest, total": [0.0, 3.0],
    }


def test_shares_of_step_time_make_one():
    # of 10 s: 2 waited, 4 forward and backward, 2 optimizer, 0.5 publish, 1.5 rest
    assert heights([record(1)], "Step time, shares") == {
        "waited for groups": [0.2],
        "forward and backward": [0.4],
        "optimizer": [0.2],
        "publish": [0.05],
        "rest": [0.15],
    }


def test_masked_shares_are_of_the_reasons_that_masked():
    records = [
        record(1, masked_fraction={"unscored": 0.0, "no_signal": 0.5, "veto": 0.0}),
        record(2, masked_fraction={"unscored": 0.0, "no_signal": 0.25, "veto": 0.125}),
    ]
    assert heights(records, "Masked") == {"no signal": [0.5, 0.25], "veto": [0.0, 0.125]}
    assert heights([record(1, masked_fraction={"unscored": 0.0})], "Masked") == {"none": [0.0]}


def test_the_audit_is_drawn():
    audit = {"length_ks": 0.25, "reward_ks": 0.125, "task_distance": 0.5}
    assert heights([record(1, audit=audit)], "Audit") == {
        "lengths (KS)": [0.25],
        "rewards (KS)": [0.125],
        "kinds of task (total variation)": [0.5],
    }


def test_prompts_are_shown_where_the_tokenizer_is_known(tmp_path):
    folder = run_folder(tmp_path, [record(1)])
    store(folder, 1, [response(0, s, "x", float(s)) for s in range(2)])
    assert read(folder).of("summary") == ["Resolved configuration"]
    tokenizer = folder / "checkpoints" / "version-00000001" / "learner" / "model" / "tokenizer.json"
    tokenizer.parent.mkdir(parents=True)
    Tokenizer(models.WordLevel({"<unk>": 0, "<b>?</b>": 1}, unk_token="<unk>")).save(str(tokenizer))
    page = read(folder)
    assert page.of("summary") == ["prompt", "prompt", "Resolved configuration"]
    assert page.of("pre")[:2] == ["<b>?</b>", "x"]


def test_an_offline_stage_shows_what_it_measured_on_held_out_rows(tmp_path):
    records = [
        {"version": v, "time_s": 3.0 * v, "seconds": 0.5, "grad_norm": 1.0}
        | {"train": {"loss": 1 / v, "accuracy": 0.5}}
        | ({"held_out": {"loss": 2 / v}} if v % 2 == 0 else {})
        for v in range(1, 9)
    ]
    page = read(run_folder(tmp_path, records, {"stage": "preference", "run": {"name": "pairs", "steps": 8}}))
    assert page.text.startswith("pairs 8 of 8 steps · 0:00:24 h · stage preference Loss")
    assert page.headlines == {
        "Loss": "1.000 → 0.250 held-out rows, first → last measured",  # 2 / 2 -> 2 / 8
        "Accuracy, share of pairs": "0.500 → 0.500 trained rows, first → last measured",
    }
    assert page.tags.count("svg") == 4 and "Reward" not in page.text and "lag" not in page.text
