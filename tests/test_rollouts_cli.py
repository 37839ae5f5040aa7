"""`headway rollouts`: what it finds, and that what a model wrote is never more than text."""

import base64
import hashlib
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from headway.cluster import rollouts_cli
from headway.cluster.rollouts_page import token_class
from headway.cluster.stored import Range, Wanted, batches, find, find_tokenizer, parse_range, pieces
from headway.core import rollouts
from headway.core.errors import ConfigError, DataError, UserError

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(rollouts_cli.rollouts)

HOSTILE = "</pre><script>alert(1)</script>[red]x[/red][/]\x1b[2J\x9b31m\u202e&lt;\r\nend"
SHOWN = "</pre><script>alert(1)</script>[red]x[/red][/]⟨U+001B⟩[2J⟨U+009B⟩31m⟨U+202E⟩&lt;⟨U+000D⟩"


def row(group, sample, *, text="x", reward: float | None = 1.0, spans=((0, 2, 0),), **changes):
    length = spans[-1][1] if spans else 0
    return {
        "rollout_id": f"{group}/{sample}",
        "group_id": group,
        "prompt_id": f"prompt-{group}",
        "sample_index": sample,
        "agent_id": "policy",
        "prompt_ids": [1],
        "response_ids": [2] * length,
        "loss_mask": [1] * length,
        "behavior_logprobs": [-1.0] * length,
        "proximal_logprobs": [-1.0] * length,
        "version_spans": [{"start": a, "end": b, "version": v} for a, b, v in spans],
        "finish_reason": "stop",
        "truncated": False,
        "text": text,
        "reward": reward,
        "verdict_reason": "correct",
        **changes,
    }


def store(run, version, rows):
    rollouts.write_parquet(rollouts.build(rows), run / "rollouts" / f"step-{version:06d}.parquet")


def make_run(folder: Path, steps, config=None):
    """A run folder with the rows of each step, by its number."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    for version, rows in steps.items():
        store(folder, version, rows)
    return folder


def add_tokenizer(run):
    """Of bytes: token i is byte i, and 256 the end of the sequence."""
    by_character = pre_tokenizers.ByteLevel.alphabet()
    # as ByteLevel writes bytes: itself where printable, else moved beyond 255
    printable = {ord(c) for c in by_character if ord(c) < 256}
    hidden = [b for b in range(256) if b not in printable]
    vocabulary = {chr(b if b in printable else 256 + hidden.index(b)): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    folder = run / "checkpoints" / "version-00000001" / "learner" / "model"
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def said(group, sample, text, *, masked=(), **changes):
    """A response of one token per byte and the end; `masked`: places of bytes that are not the policy's."""
    ids = [*text.encode(), 256]
    mask = [int(i not in masked) for i in range(len(ids))]
    logprobs = [-0.5 if own else math.nan for own in mask]
    return row(
        group,
        sample,
        **{
            "text": text,
            "spans": ((0, len(ids), 0),),
            "prompt_ids": list(b"What?"),
            "response_ids": ids,
            "loss_mask": mask,
            "behavior_logprobs": logprobs,
            "proximal_logprobs": logprobs,
            **changes,
        },
    )


def run_cli(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result


def found(*arguments):
    """(step, rollout) of every line of JSON."""
    lines = map(json.loads, run_cli(*arguments, "--json").stdout.splitlines())
    return [(line["step"], line["rollout_id"]) for line in lines]


# ---- what is found -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("7", 7, 7),
        ("3..9", 3, 9),
        ("3..", 3, math.inf),
        ("..9", -math.inf, 9),
        ("-1..-0.5", -1, -0.5),
        ("0.25", 0.25, 0.25),
        ("-1", -1, -1),
    ],
)
def test_a_range_is_a_number_or_two_ends(text, low, high):
    assert parse_range("--step", text) == Range(low, high)


@pytest.mark.parametrize("text", ["", "..", "x", "3..x", "9..3", "nan", "1..2..3", "nan..3"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(ConfigError, match=r"--lag .*such as 7, 3\.\.9"):
        parse_range("--lag", text)


@pytest.fixture
def run(tmp_path):
    return make_run(
        tmp_path / "run",
        {
            1: [
                row(0, 0, reward=0.0, verdict_reason="wrong", text="Let me think", spans=((0, 9, 0),)),
                row(0, 1, reward=0.5, spans=((0, 4, 0),), agent_id="checker"),
            ],
            2: [
                row(1, 0, reward=1.0, spans=((0, 3, 0), (3, 5, 1))),
                row(1, 1, reward=None, verdict_reason="timeout", spans=((0, 2, 1),)),
            ],
            10: [row(2, 0, reward=-1.0, verdict_reason="no_answer", text="LET ME", spans=((0, 1, 7),))],
        },
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [(10, "2/0"), (2, "1/0"), (2, "1/1"), (1, "0/0"), (1, "0/1")]),
        (["--sort", "step"], [(1, "0/0"), (1, "0/1"), (2, "1/0"), (2, "1/1"), (10, "2/0")]),
        (["--step", "2"], [(2, "1/0"), (2, "1/1")]),
        (["--step", "..2", "--limit", "3"], [(2, "1/0"), (2, "1/1"), (1, "0/0")]),
        (["--reward", "0..0.5"], [(1, "0/0"), (1, "0/1")]),
        (["--reward", "-1"], [(10, "2/0")]),
        (["--length", "4..5"], [(2, "1/0"), (1, "0/1")]),
        # step 2 was trained at version 1: lag 1 - 0 and 1 - 1; step 10 at version 9: lag 9 - 7
        (["--lag", "1.."], [(10, "2/0"), (2, "1/0")]),
        (["--lag", "0"], [(2, "1/1"), (1, "0/0"), (1, "0/1")]),
        (["--reason", "timeout", "--reason", "wrong"], [(2, "1/1"), (1, "0/0")]),
        (["--agent", "checker"], [(1, "0/1")]),
        (["--search", "let me"], [(10, "2/0"), (1, "0/0")]),
        (["--search", "let me", "--step", "1"], [(1, "0/0")]),
        (["--search", "."], []),
        (["--sort", "-length", "--limit", "2"], [(1, "0/0"), (2, "1/0")]),
        (["--sort", "reward"], [(10, "2/0"), (1, "0/0"), (1, "0/1"), (2, "1/0"), (2, "1/1")]),
        (["--sort", "-reward"], [(2, "1/0"), (1, "0/1"), (1, "0/0"), (10, "2/0"), (2, "1/1")]),
        (["--best", "2"], [(2, "1/0"), (1, "0/1")]),
        (["--worst", "2"], [(10, "2/0"), (1, "0/0")]),
        (["--best", "1", "--worst", "1"], [(2, "1/0"), (10, "2/0")]),
        (["--best", "9", "--reason", "timeout"], []),
    ],
)
def test_filters_and_orders(run, arguments, expected):
    assert found(run, *arguments) == expected


def test_a_reward_is_compared_as_it_is_stored(tmp_path):
    # float32's 0.1 is 0.100000001490116: above the double 0.1, and yet the reward that was meant
    run = make_run(tmp_path / "run", {1: [row(0, 0, reward=0.1), row(0, 1, reward=0.2)]})
    assert found(run, "--reward", "0.1") == found(run, "--reward", "..0.1") == [(1, "0/0")]
    assert json.loads(run_cli(run, "--json", "--limit", 1).stdout)["reward"] == 0.1


def test_of_equal_rewards_one_of_each_group_comes_first(tmp_path):
    run = make_run(
        tmp_path / "run", {1: [row(g, s, reward=float(g > 0)) for g in range(3) for s in range(2)]}
    )
    assert found(run, "--best", "3") == [(1, "1/0"), (1, "2/0"), (1, "1/1")]


def test_a_batch_of_several_steps_counts_each_groups_own(tmp_path):
    # Batch 4 holds steps 3 and 4 with one group each, trained at versions 2 and 3; both were sampled at version 1.
    config = {"learner": {"steps_per_batch": 2, "groups_per_step": 1}}
    run = make_run(
        tmp_path / "run", {4: [row(g, s, spans=((0, 1, 1),)) for g in (5, 6) for s in (0, 1)]}, config
    )
    assert found(run, "--sort", "step") == [(3, "5/0"), (3, "5/1"), (4, "6/0"), (4, "6/1")]
    assert found(run, "--limit", "3") == [(4, "6/0"), (4, "6/1"), (3, "5/0")]
    assert found(run, "--step", "4") == found(run, "--lag", "2") == [(4, "6/0"), (4, "6/1")]
    assert found(run, "--step", "2") == []


ROWS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.one_of(st.none(), st.sampled_from([-0.5, 0.0, 0.25, 1.0])),
        st.integers(1, 4),
        st.sampled_from(["wrong", "correct"]),
    ),
    min_size=1,
    max_size=8,
)
ENDS = st.sampled_from([-math.inf, -0.5, 0.0, 0.25, 1.0, 2.0, 3.0, math.inf])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=ROWS, reward=st.tuples(ENDS, ENDS), length=st.tuples(ENDS, ENDS), reasons=st.sets(st.just("wrong"))
)
def test_a_filter_finds_what_a_loop_over_all_rows_finds(tmp_path_factory, rows, reward, length, reasons):
    run = make_run(
        tmp_path_factory.mktemp("run"),
        {
            3: [
                row(group, number, reward=value, spans=((0, tokens, 0),), verdict_reason=reason)
                for number, (group, value, tokens, reason) in enumerate(rows)
            ]
        },
    )
    wanted = Wanted(reward=Range(*reward), length=Range(*length), reasons=tuple(reasons))
    unbounded = reward == (-math.inf, math.inf)
    expected = [
        f"{group}/{number}"
        for number, (group, value, tokens, reason) in enumerate(rows)
        if (unbounded if value is None else reward[0] <= value <= reward[1])
        and length[0] <= tokens <= length[1]
        and (not reasons or reason in reasons)
    ]
    (batch,) = batches(run, {})
    assert [rollout.rollout_id for rollout in find(batch, wanted)] == expected


def test_a_search_reads_no_token_columns(tmp_path):
    noise = np.random.default_rng(0).normal(size=(8, 50_000)).astype(np.float32).tolist()
    rows = [
        row(
            0,
            s,
            spans=((0, 50_000, 0),),
            text="a needle",
            behavior_logprobs=noise[s],
            proximal_logprobs=noise[-s],
        )
        for s in range(8)
    ]
    run = make_run(tmp_path / "run", {1: rows})
    (batch,) = batches(run, {})
    size = batch.path.stat().st_size
    assert size > 1_000_000

    def read_bytes():
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    before = read_bytes()
    assert len(find(batch, Wanted(text="needle", length=Range(50_000, 50_000)))) == 8
    assert read_bytes() - before < size / 20


# ---- JSON and terminal -------------------------------------------------------------------------------------


def test_a_line_of_json_says_all_but_the_tokens(tmp_path):
    parts = [{"name": "step", "value": 0.25}, {"name": "step", "value": 0.75}]
    changes = {"reward_parts": parts, "finish_reason": "length", "truncated": True, "reward": 0.75}
    run = make_run(tmp_path / "run", {2: [said(0, 3, "Hé", **changes)]})
    add_tokenizer(run)
    (line,) = run_cli(run, "--json").stdout.splitlines()
    assert json.loads(line) == {
        "step": 2,
        "rollout_id": "0/3",
        "group_id": 0,
        "prompt_id": "prompt-0",
        "sample_index": 3,
        "agent_id": "policy",
        "reward": 0.75,
        "reward_parts": parts,
        "verdict_reason": "correct",
        "length": 4,
        "lag": 1,
        "version_spans": [{"start": 0, "end": 4, "version": 0}],
        "finish_reason": "length",
        "truncated": True,
        "prompt": "What?",
        "text": "Hé",
    }


def test_json_holds_nothing_that_a_terminal_obeys(tmp_path):
    run = make_run(tmp_path / "run", {1: [said(0, 0, HOSTILE)]})
    output = run_cli(run, "--json").stdout
    assert output.isascii() and output.removesuffix("\n").isprintable()
    assert json.loads(output)["text"] == HOSTILE


def test_the_terminal_shows_a_rollout(tmp_path):
    run = make_run(
        tmp_path / "run",
        {
            3: [
                said(
                    4,
                    1,
                    "Hello",
                    reward=0.5,
                    reward_parts=[{"name": "format", "value": 1.0}, {"name": "answer", "value": 0.0}],
                    version_spans=[
                        {"start": 0, "end": 2, "version": 0},
                        {"start": 2, "end": 6, "version": 1},
                    ],
                )
            ]
        },
    )
    add_tokenizer(run)
    result = run_cli(run)
    assert result.stdout.split("\n") == [
        "step 3 · reward 0.500 correct · 6 tokens, stop · lag 2 · v0 [0, 2), v1 [2, 6)",
        "  rollout 4/1, prompt prompt-4, agent policy",
        "  parts  format 1.000, answer 0.000",
        "  prompt",
        "    What?",
        "  response",
        "    Hello",
        "",
        "",
    ]
    assert result.stderr == "1 rollout\n"


def on_a_terminal(monkeypatch, *arguments):
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", soft_wrap=True)
    monkeypatch.setattr(rollouts_cli, "console", console)
    run_cli(*arguments)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_what_a_model_wrote_commands_no_terminal(tmp_path, monkeypatch, with_tokenizer):
    row = said(
        0, 0, HOSTILE, masked=(0,), verdict_reason="[blink]\x1b[5m", prompt_id="\x1b]0;t\x07", agent_id="[/x]"
    )
    run = make_run(tmp_path / "run", {1: [row]})
    if with_tokenizer:
        add_tokenizer(run)
    output = on_a_terminal(monkeypatch, run)
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    assert not set(plain) & {"\x1b", "\x9b", "\x07", "\r", "\u202e"}
    assert SHOWN in plain
    assert "[blink]⟨U+001B⟩[5m" in plain and "⟨U+001B⟩]0;t⟨U+0007⟩" in plain and "agent [/x]" in plain
    assert ";5m" not in output and "\x1b[5m" not in output  # nothing blinks


def test_colours_and_dimmed_tool_text(tmp_path, monkeypatch):
    run = make_run(
        tmp_path / "run",
        {
            1: [
                said(0, 0, "ask TOOL ok", masked=range(4, 8), reward=1.0),
                said(1, 0, "no", reward=0.0, verdict_reason="wrong"),
                said(2, 0, "?", reward=None, verdict_reason="timeout"),
            ]
        },
    )
    add_tokenizer(run)
    output = on_a_terminal(monkeypatch, run)
    dim = re.findall(r"\x1b\[2m([^\x1b]*)\x1b\[0m", output)
    assert "".join(text for text in dim if not text.startswith("  rollout")) == "TOOL"
    assert re.search(r"\x1b\[[\d;]*32mreward 1.000 correct\x1b", output)
    assert re.search(r"\x1b\[[\d;]*31mreward 0.000 wrong\x1b", output)
    assert re.search(r"\x1b\[[\d;]*35munscored timeout\x1b", output)


@pytest.mark.parametrize("masked", [(), range(4990, 5010)])
def test_a_long_response_loses_its_middle(tmp_path, masked):
    text = "a" * 2000 + "b" * 5000 + "c" * 1995
    run = make_run(tmp_path / "run", {1: [said(0, 0, text, masked=masked)]})
    add_tokenizer(run)
    lines = run_cli(run).stdout.splitlines()
    assert lines[5] == "    " + "a" * 2000
    # what is written of a special token counts where tokens are shown one by one
    end, left_out = ("<end>", 5000) if masked else ("", 4995)
    assert lines[6] == f"    [… {left_out:,} characters left out …]"
    assert lines[7] == "    " + ("b" * 5 if not masked else "") + "c" * 1995 + end


def test_the_rest_is_announced(run):
    assert "2 rollouts, and there are more (--limit)" in run_cli(run, "--limit", "2").stderr
    assert "5 rollouts;" in run_cli(run, "--limit", "5").stderr
    assert "5 rollouts;" in run_cli(run, "--limit", "5", "--sort", "lag").stderr
    assert "1 rollout, and" in run_cli(run, "--limit", "1", "--sort", "lag").stderr


def test_without_a_tokenizer_there_are_ids(tmp_path):
    run = make_run(tmp_path / "run", {1: [said(0, 0, "Hi")]})
    result = run_cli(run)
    assert "    87 104 97 116 63\n" in result.stdout
    assert "tokenizer was not found" in result.stderr
    assert json.loads(run_cli(run, "--json").stdout)["prompt"] is None


def test_the_tokenizer_of_the_model_folder_will_do(tmp_path):
    run = make_run(tmp_path / "run", {})
    add_tokenizer(run)
    folder = (run / "checkpoints").rename(tmp_path / "model") / "version-00000001" / "learner" / "model"
    tokenizer = find_tokenizer(run, {"model": {"path": str(folder)}})
    assert tokenizer is not None and tokenizer.get_vocab_size() == 257
    (folder / "tokenizer.json").write_text("{")
    assert find_tokenizer(run, {"model": {"path": str(folder)}}) is None
    assert find_tokenizer(run, {"model": {"path": str(tmp_path / "gone")}}) is None


def test_a_character_of_several_tokens_belongs_to_the_last(tmp_path):
    run = make_run(tmp_path / "run", {})
    add_tokenizer(run)
    assert pieces(find_tokenizer(run, {}), [*"aé👩".encode(), 256]) == [
        "a", "", "é", "", "", "", "👩", "<end>",
    ]  # fmt: skip


# ---- the page ----------------------------------------------------------------------------------------------


class Tokens(HTMLParser):
    """The page's tags, the tokens of each response as (class, text), and the attributes beside them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.responses, self.data, self.scripts, self.text = [], [], [], [], ""
        self._inside, self._tag = False, ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._tag = tag
        values = dict(attrs)
        if tag == "pre" and values.get("class") == "tokens":
            self._inside = True
            self.responses.append([])
            self.data.append({k.removeprefix("data-"): v for k, v in attrs if k.startswith("data-")})
        elif tag == "i" and self._inside:
            self.responses[-1].append([values.get("class") or "", ""])

    def handle_endtag(self, tag):
        self._inside = self._inside and tag != "pre"
        self._tag = ""

    def handle_data(self, data):
        if self._tag == "script":
            self.scripts.append(data)
        elif self._tag == "i" and self._inside:
            self.responses[-1][-1][1] += data
        self.text += data


def page_of(run, *arguments):
    file = run / "page.html"
    run_cli(run, "--html", file, *arguments)
    return file.read_text(encoding="utf-8")


def test_tokens_are_classed_by_log_ratio_version_and_mask(tmp_path):
    behavior = [-1.0, -1.0, -1.0, math.nan, -1.0, -1.0]
    proximal = [-0.95, -3.0, -1.01, math.nan, math.nan, -0.5]
    response = said(
        0,
        0,
        "abcde",
        masked=(3,),
        behavior_logprobs=behavior,
        proximal_logprobs=proximal,
        version_spans=[{"start": 0, "end": 4, "version": 6}, {"start": 4, "end": 6, "version": 7}],
    )
    run = make_run(tmp_path / "run", {9: [response]})
    add_tokenizer(run)
    page = Tokens(page_of(run))
    # +0.05, -2, -0.01 (no colour), masked, unknown, +0.5; versions 6 and 7 have the colours 0 and 1
    assert page.responses == [
        [["p1 v0", "a"], ["n4 v0", "b"], ["v0", "c"], ["m", "d"], ["u v1", "e"], ["p3 v1", "<end>"]]
    ]
    assert page.data == [
        {
            "trained": "8",
            "ids": "97 98 99 100 101 256",
            "versions": "6 6 6 6 7 7",
            "behavior": "-1 -1 -1 - -1 -1",
            "proximal": "-0.95 -3 -1.01 - - -0.5",
        }
    ]
    assert "5 sampled tokens, 4 with a log-ratio" in page.text


@pytest.mark.parametrize(
    ("log_ratio", "expected"),
    [(0.0, "v2"), (0.0199, "v2"), (-0.02, "n1 v2"), (0.1, "p2 v2"), (-0.3, "n3 v2"), (50.0, "p4 v2")],
)
def test_colours_deepen_at_their_steps(log_ratio, expected):
    assert token_class(1, log_ratio, 8) == expected


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_what_a_model_wrote_is_text_on_the_page(tmp_path, with_tokenizer):
    row = said(
        0, 0, HOSTILE, verdict_reason="<b>", prompt_id="<u>", agent_id='"><s>', prompt_ids=list(b"<script>")
    )
    run = make_run(tmp_path / "run", {1: [row]}, {"run": {"name": "<h6>"}})
    if with_tokenizer:
        add_tokenizer(run)
    html = page_of(run, "--search", "<script>alert", "--sort", "step")
    page = Tokens(html)
    assert page.tags.count("script") == 1 and not {"b>", "u", "s", "h6"} & set(page.tags)
    assert not set(html) & {"\x1b", "\x9b", "\r", "\u202e"}
    assert "<h6>: rollouts" in page.text and "with “<script>alert”" in page.text and '"><s>' in page.text
    if with_tokenizer:
        assert "".join(text for _, text in page.responses[0]) == f"{SHOWN}\nend<end>"
        assert (
            sum("l" in classes.split() for classes, _ in page.responses[0]) == 1
        )  # one token is a line break


def test_the_page_runs_one_script_and_fetches_nothing(tmp_path):
    run = make_run(tmp_path / "run", {1: [said(0, 0, "x")]})
    html = page_of(run)
    (script,) = Tokens(html).scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in html
    assert not re.search(r"\b(src|href)=|url\(|@import|https?:|innerHTML|\bon\w+=", html)
    assert not {"img", "link", "iframe", "object", "base", "form"} & set(Tokens(html).tags)
    assert '<meta name="viewport"' in html and "prefers-color-scheme: dark" in html


def test_best_and_worst_are_sections_of_the_page(tmp_path):
    run = make_run(tmp_path / "run", {1: [said(g, 0, "x", reward=g / 2) for g in range(3)]})
    text = Tokens(page_of(run, "--best", "1", "--worst", "1")).text
    assert text.index("Best") < text.index("reward 1.000") < text.index("Worst") < text.index("reward 0.000")
    assert "reward 0.500" not in text


def test_a_page_without_rollouts_says_so(tmp_path):
    run = make_run(tmp_path / "run", {1: [said(0, 0, "x")]})
    assert "No rollouts." in page_of(run, "--best", "1", "--reward", "5..")


# ---- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "--html", "x.html"], "--json and --html: say one"),
        (["--best", "1", "--limit", "2"], "leave out --sort and --limit"),
        (["--worst", "1", "--sort", "lag"], "leave out --sort and --limit"),
        (["--sort", "age"], "--sort 'age': say one of step, reward, length, lag"),
        (["--step", "x"], "--step 'x': say a number or a range"),
        (["--html", "."], "--html .: name a file"),
        (["--html", "/nowhere/x.html"], "--html /nowhere/x.html: No such file"),
    ],
)
def test_a_wrong_option_says_what_to_change(run, arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        run_cli(run, *arguments)


def test_a_folder_without_rollouts(tmp_path):
    with pytest.raises(DataError, match=r"gone is no folder; name a run folder"):
        run_cli(tmp_path / "gone")
    with pytest.raises(DataError, match=r"holds no run; name a run folder"):
        run_cli(tmp_path)
    with pytest.raises(DataError, match=r"rollouts holds no rollouts; .*run\.save_rollouts=true"):
        run_cli(make_run(tmp_path / "run", {}))


def test_tables_that_are_not_ours(run):
    file = run / "rollouts" / "step-000010.parquet"
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"major": b"9"}), file)
    with pytest.raises(DataError, match=r"step-000010\.parquet cannot be read: rollout schema 9 is unknown"):
        run_cli(run, "--json")
    assert found(run, "--step", "1") == [(1, "0/0"), (1, "0/1")]  # it is not looked at
    pq.write_table(pa.table({"a": [1]}), file)
    with pytest.raises(DataError, match="not a rollout table"):
        run_cli(run, "--best", "1")
    file.write_bytes(b"PAR1 cut off")
    with pytest.raises(DataError, match=r"step-000010\.parquet cannot be read"):
        run_cli(run)
    file.rename(file.with_name("step-ten.parquet"))
    with pytest.raises(DataError, match=r"step-ten\.parquet is no batch of a run"):
        run_cli(run)
