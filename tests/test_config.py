"""One wrong value is one clear line: file, key, value, cause, what to write instead."""

import pytest

from hsdaemon import config
from hsdaemon.errors import ConfigError

LEAST = '[data]\npath="/d/x.jsonl"\n[model]\npath="/m"\n[output]\npath="/o"\n'

WRONG = {
    "unknown key": ("[engine]\ntpp = 1", ["engine.tpp", "write tp"]),
    "unknown table": ("[enjine]\ntp = 1", ["enjine", "write engine"]),
    "unknown key in a list": ('[[evict.units]]\npatern = "x"', ["evict.units[0].patern", "write pattern"]),
    "wrong type": ('[engine]\ntp = "8"', ["engine.tp = '8'", "int"]),
    "out of range": ("[engine]\nport = 80", ["engine.port = 80", "1024"]),
    "not one of": ('[[evict.units]]\npattern = "x"\nhow = "kill"', ["evict.units[0].how", "kill"]),
    "radix cache": ("[engine]\nradix_cache = true", ["engine.radix_cache", "write false"]),
    "ca_18 pipeline": ("[engine]\npipeline = 2", ["engine.pipeline = 2", "write 1"]),
    "ca_18 overlap": ("[engine]\ntwo_batch_overlap = true", ["engine.two_batch_overlap", "write false"]),
    "ca_18 disaggregation": ('[engine]\ndisaggregation = "prefill"', ["engine.disaggregation", "null"]),
    "not TOML": ("[", ["not TOML", "line"]),
    "no end of time": ("[supervisor]\nprobe_deadline_s = inf", ["probe_deadline_s = inf", "<= 2000000"]),
    "a bound that bounds nothing": ("[proof]\nmax_relative_error = inf", ["max_relative_error = inf", "<= 1"]),
    "fewer tokens than none": ("[engine]\nmax_total_tokens = -1", ["max_total_tokens = -1", ">= 0"]),
    "a GPU twice": ('[gpus]\nuuids = ["GPU-a", "GPU-a"]\n[engine]\ntp = 2', ["gpus.uuids", "twice"]),
    "spool longer than the watchdog": ("[spool]\nwait_s = 200.0", ["spool.wait_s", "150"]),
    "GPUs and ranks": ('[gpus]\nuuids = ["GPU-a"]\n[engine]\ntp = 2', ["gpus.uuids", "tp = 2"]),
}


@pytest.mark.parametrize(("extra", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_value_is_one_clear_line(extra: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(LEAST + extra, "hs.toml")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("cannot use hs.toml: ")
    for word in words:
        assert word in line


def test_every_impossible_combination_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(LEAST + "[engine]\npipeline = 2\nradix_cache = true", "hs.toml")
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("form", "norm", "ok"),
    [
        ("specforge", "post", True),
        ("specforge", "pre", False),
        ("modelopt", "post", True),
        ("modelopt", "pre", True),
        ("speculators", "post", False),
        ("speculators", "pre", True),
    ],
)
def test_nu_04_each_format_takes_only_its_norm(form: str, norm: str, ok: bool) -> None:
    text = f'[data]\npath="/d/x.jsonl"\n[model]\npath="/m"\nnorm="{norm}"\n[output]\npath="/o"\nformat="{form}"\n'
    if ok:
        assert config.parse(text, "hs.toml").output.format == form
    else:
        with pytest.raises(ConfigError, match=r"model\.norm"):
            config.parse(text, "hs.toml")


@pytest.mark.parametrize("layers", ["[1, 3]", "[3, 1, 4]", "[1, 1, 4]"])
def test_layers_are_three_and_ascending(layers: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.layers"):
        config.parse(LEAST.replace('"/m"', f'"/m"\nlayers = {layers}'), "hs.toml")
