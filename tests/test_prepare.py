"""Chats become ids and masks exactly as the model's authors mean them; what cannot is told by its row number."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from hsdaemon import cli
from hsdaemon.data import chat, prepare
from hsdaemon.data.chat import BadChat, Template
from hsdaemon.data.tokenizer import ChildTokenizer, FastTokenizer, open_tokenizer, template_source
from hsdaemon.errors import DataError

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
PLAIN = """{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif %}
{%- if tools %}{{ tools | tojson }}{%- endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + eos_token + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
MARKED = """{% for m in messages %}
{% if m.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}

{% else %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{% endfor %}"""
THOUGHT = PLAIN.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif")
FORGETS = """{% for m in messages %}[{{ m.role }}]{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}
{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

CHAT = [
    {"role": "user", "content": "Hällo <b>\u4f60\u597d</b>?"},
    {"role": "assistant", "content": "Good 🦊 day."},
    {"role": "user", "content": "More\n\nlines"},
    {"role": "assistant", "content": "No."},
]


def save_model(folder: Path, template: str) -> Path:
    """A byte-level tokenizer with a few merges and special tokens, and the template, as transformers saves them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, "oo", "ay", "ss"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [("o", "o"), ("a", "y"), ("s", "s")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    make: Any = transformers.PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)
    fast.save_pretrained(folder)
    return folder


def theirs(folder: Path, talk: list[dict[str, Any]], **options: Any) -> Any:
    """What transformers makes of the chat: input_ids, and assistant_masks when asked."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(talk, return_dict=True, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("marked"), MARKED)


def ours(folder: Path, row: dict[str, Any]) -> chat.Tokens:
    return chat.tokens(row, Template(*template_source(folder)), open_tokenizer(folder, trust_remote_code=False))


def said(folder: Path, tokens: chat.Tokens) -> list[str]:
    """The runs of masked tokens, as text."""
    fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    runs: list[list[int]] = []
    before = 0
    for token, m in zip(tokens.ids, tokens.mask, strict=True):
        if m and not before:
            runs.append([])
        if m:
            runs[-1].append(token)
        before = m
    return [fast.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize("name", ["plain", "marked"])
def test_ids_are_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    assert ours(folder, {"messages": CHAT}).ids == theirs(folder, CHAT)["input_ids"]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_a_marked_mask_is_that_of_transformers(marked: Path, turns: list[tuple[str, str]]) -> None:
    talk = [m for q, a in turns for m in ({"role": "user", "content": q}, {"role": "assistant", "content": a})]
    expected = theirs(marked, talk, return_assistant_tokens_mask=True)
    found = ours(marked, {"messages": talk})
    assert found.ids == expected["input_ids"]
    assert found.mask == expected["assistant_masks"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_a_mask_by_prefixes_is_each_answer_with_its_end(plain: Path, turns: list[tuple[str, str]]) -> None:
    talk = [m for q, a in turns for m in ({"role": "user", "content": q}, {"role": "assistant", "content": a})]
    assert said(plain, ours(plain, {"messages": talk})) == [f"{a}<|im_end|>\n" for _, a in turns]


def test_a_header_that_opens_a_thought_is_no_obstacle(tmp_path: Path) -> None:
    folder = save_model(tmp_path, THOUGHT)
    assert said(folder, ours(folder, {"messages": CHAT})) == ["Good 🦊 day.<|im_end|>\n", "No.<|im_end|>\n"]


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    with pytest.raises(BadChat, match="prefix: message 1 differs"):
        Template(FORGETS, {}).spans(CHAT, None)


def test_marks_count_inside_macros_too(tmp_path: Path) -> None:
    template = (
        "{% macro say(m) %}A:{% generation %}{{ m.content }}{% endgeneration %}!{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ say(m) }}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    folder = save_model(tmp_path, template)
    assert said(folder, ours(folder, {"messages": CHAT})) == ["Good 🦊 day.", "No."]


def test_conversations_are_messages_under_other_names(plain: Path) -> None:
    names = {"user": "human", "assistant": "gpt"}
    talk = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    assert ours(plain, {"conversations": talk}) == ours(plain, {"messages": CHAT})


def test_tools_are_offered_as_they_are_or_as_json(plain: Path) -> None:
    tools = [{"name": "f<x>"}]
    with_tools = ours(plain, {"messages": CHAT, "tools": tools})
    assert with_tools == ours(plain, {"messages": CHAT, "tools": json.dumps(tools)})
    assert with_tools.ids == theirs(plain, CHAT, tools=tools)["input_ids"]


def test_a_tokenizer_in_python_is_asked_in_a_child(plain: Path) -> None:
    template = Template(*template_source(plain))
    child = ChildTokenizer(plain, trust_remote_code=False)
    try:
        assert child.encode("x").offsets is None
        found = chat.tokens({"messages": CHAT}, template, child)
    finally:
        child.close()
    assert found == ours(plain, {"messages": CHAT})


def test_a_child_that_cannot_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot load the tokenizer of .*--trust-remote-code"):
        open_tokenizer(tmp_path, trust_remote_code=False)


OWN_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizer
Path(__file__).with_name("ran").touch()

class Own(PreTrainedTokenizer):
    vocab_files_names = {}
    vocab_size = 1000

    def get_vocab(self):
        return {chr(i): i for i in range(1000)}

    def _tokenize(self, text, **_):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)
"""


@pytest.mark.parametrize("trusted", [True, False])
def test_code_in_the_models_folder_runs_only_when_trusted(
    tmp_path: Path, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    monkeypatch.setenv("HF_HOME", str(cache))
    folder.mkdir()
    (folder / "tokenization_own.py").write_text(OWN_CODE)
    (folder / "config.json").write_text("{}")
    auto = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(auto))
    if trusted:
        child = open_tokenizer(folder, trust_remote_code=True)
        assert child.encode("hé").ids == [ord("h"), ord("é")]
        child.close()
    else:
        with pytest.raises(DataError, match="runs only with --trust-remote-code"):
            open_tokenizer(folder, trust_remote_code=False)
    assert bool(list(tmp_path.rglob("ran"))) == trusted


def test_a_template_cannot_leave_its_sandbox() -> None:
    template = Template("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(BadChat, match="template: SecurityError"):
        template.text(CHAT, None)


ASK = '{"role": "user", "content": "x"}'
GOOD = {"messages": CHAT}
BAD: dict[str, tuple[str | bytes, str]] = {
    "not JSON": ("{", "json"),
    "not an object": ("[1]", "json"),
    "not UTF-8": (b'{"messages": "\xff"}', "json"),
    "too deep": ("[" * 100_000, "json"),
    "no chat": ('{"text": "x"}', "no-chat"),
    "empty": ('{"messages": []}', "no-chat"),
    "messages is a text": ('{"messages": "hello"}', "no-chat"),
    "a message is a text": ('{"messages": ["hello"]}', "message"),
    "no text": ('{"messages": [{"role": "assistant", "content": null}]}', "message"),
    "content is a number": ('{"messages": [{"role": "assistant", "content": 3}]}', "message"),
    "no role": ('{"messages": [{"content": "x"}]}', "role"),
    "unknown role": ('{"messages": [{"role": "wizard", "content": "x"}]}', "role"),
    "unknown speaker": ('{"conversations": [{"from": "wizard", "value": "x"}]}', "role"),
    "role is a list": ('{"messages": [{"role": [], "content": "x"}]}', "role"),
    "no assistant": ('{"messages": [{"role": "user", "content": "x"}]}', "no-assistant"),
    "a part list that this template does not know": (
        '{"messages": [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}]}',
        "template",
    ),
    "half a character": (f'{{"messages": [{ASK}, {{"role": "assistant", "content": "\\ud800"}}]}}', "text"),
    "tools is a number": (f'{{"messages": [{ASK}, {{"role": "assistant", "content": "x"}}], "tools": 3}}', "tools"),
    "id is a list": (f'{{"messages": [{ASK}, {{"role": "assistant", "content": "x"}}], "id": [1]}}', "id"),
}


@pytest.fixture
def files(tmp_path: Path, plain: Path) -> tuple[Path, Path, list[str]]:
    source, out = tmp_path / "chats.jsonl", tmp_path / "train.jsonl"
    return source, out, ["prepare", str(source), "--model", str(plain), "--out", str(out)]


def write(source: Path, bad: str | bytes) -> None:
    good = json.dumps(GOOD).encode()
    source.write_bytes(b"\n".join([good, b"", bad.encode() if isinstance(bad, str) else bad, good]) + b"\n")


@pytest.mark.parametrize(("bad", "code"), BAD.values(), ids=BAD)
def test_a_bad_row_is_skipped_by_number(
    files: tuple[Path, Path, list[str]], bad: str | bytes, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out, words = files
    write(source, bad)
    assert cli.main([*words, "--on-bad-row", "skip"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"row 1 skipped: {code}: ")
    assert said.out.splitlines()[-1].startswith("prepare: ok rows=3 written=2 skipped=1 ")
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(("bad", "code"), BAD.values(), ids=BAD)
def test_a_bad_row_stops_by_default_and_leaves_what_was(
    files: tuple[Path, Path, list[str]], bad: str | bytes, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out, words = files
    write(source, bad)
    out.write_text("earlier")
    assert cli.main(words) == 65
    assert f"row 1: {code}: " in capsys.readouterr().err
    assert out.read_text() == "earlier"
    assert sorted(p.name for p in source.parent.iterdir()) == ["chats.jsonl", "train.jsonl"]


def test_rows_carry_id_ids_and_mask(files: tuple[Path, Path, list[str]], plain: Path) -> None:
    source, out, words = files
    source.write_text("\n".join(json.dumps(GOOD | extra) for extra in ({"id": 7}, {"id": "a"}, {})))
    assert cli.main(words) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.get("id") for row in rows] == ["7", "a", None]
    expected = ours(plain, GOOD)
    assert all((row["input_ids"], row["loss_mask"]) == (expected.ids, expected.mask) for row in rows)


def test_parquet_gives_what_json_lines_give(files: tuple[Path, Path, list[str]], tmp_path: Path) -> None:
    source, out, words = files
    source.write_text(json.dumps(GOOD))
    assert cli.main(words) == 0
    first = out.read_text()
    pq.write_table(pa.table({"messages": [CHAT], "other": [1]}), tmp_path / "chats.parquet")
    assert cli.main([words[0], str(tmp_path / "chats.parquet"), *words[2:]]) == 0
    assert out.read_text() == first


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("chats.jsonl", None, "No such file"),
        ("chats.jsonl", b"", "none of its 0 rows"),
        ("chats.csv", b"x", "name a .jsonl or .parquet"),
        ("chats.parquet", b"PAR1 no", "write it again"),
    ],
)
def test_a_file_that_is_none_is_one_line(
    tmp_path: Path, plain: Path, name: str, content: bytes | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / name
    if content is not None:
        source.write_bytes(content)
    assert cli.main(["prepare", str(source), "--model", str(plain)]) in (65, 73)
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_parquet_without_the_column_names_those_it_has(tmp_path: Path, plain: Path) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "chats.parquet")
    with pytest.raises(DataError, match="it has text"):
        prepare.prepare(
            tmp_path / "chats.parquet",
            tmp_path / "x.jsonl",
            Template(*template_source(plain)),
            FastTokenizer(plain / "tokenizer.json"),
            "refuse",
            print,
        )


def test_a_parquet_row_that_cannot_be_read_is_skipped_by_number(
    files: tuple[Path, Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text that is none, a date beyond the calendar, a zone that nobody knows: each row by itself."""
    _, out, words = files
    source = tmp_path / "chats.parquet"
    words = [words[0], str(source), *words[2:], "--on-bad-row", "skip"]
    texts = pa.array([b"a", b"\xff\xfe", b"c"], pa.binary()).view(pa.string())
    far = pa.array([None, 2**62, None], pa.int64()).view(pa.timestamp("us"))
    zoned = pa.array([None, 1, None], pa.int64()).view(pa.timestamp("us", tz="Nowhere/Land"))
    for column in (texts, far, zoned):
        pq.write_table(pa.table({"messages": [CHAT] * 3, "id": column}), source)
        assert cli.main(words) == 0
        assert capsys.readouterr().err.startswith("row 1 skipped: parquet: cannot be read: ")
        assert len(out.read_text().splitlines()) == 2


BROKEN_MODELS = {
    "no template": {"tokenizer_config.json": "{}"},
    "config is no JSON": {"tokenizer_config.json": "{"},
    "config is a list": {"tokenizer_config.json": "[]"},
    "template does not parse": {"chat_template.jinja": "{% for %}"},
    "tokenizer is none": {"chat_template.jinja": "x", "tokenizer.json": "{}"},
}


@pytest.mark.parametrize("parts", BROKEN_MODELS.values(), ids=BROKEN_MODELS)
def test_a_broken_model_folder_is_one_line(
    tmp_path: Path, parts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in parts.items():
        (tmp_path / name).write_text(text)
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps(GOOD))
    assert cli.main(["prepare", str(source), "--model", str(tmp_path)]) == 65
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": [{"name": "default", "template": "T"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert template_source(tmp_path) == ("T", {"bos_token": "<s>", "eos_token": "</s>"})
    (tmp_path / "chat_template.jinja").write_text("alone")
    assert template_source(tmp_path)[0] == "alone"
