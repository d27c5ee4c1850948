"""What a spec points at: places, model folders, prompt rows by number, contexts, registered functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_core.spec import EngineHosts, RewardHosts, check_files, parse_spec
from ppo_core.spec.files import MAX_FAULTS_A_FILE, context_length
from ppo_core.spec.prompt_files import read_json_row
from ppo_core.spec.prompt_rows import MAX_PROMPT_CHARACTERS

ROWS = [{"prompt": f"a film about {number}"} for number in range(4)]


class Place:
    """A folder with a model and two prompt files that a good spec names; tests spoil one thing each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = root / "policy"
        self.model.mkdir()
        self.config({"model_type": "llama", "max_position_embeddings": 128})
        (self.model / "model.safetensors").touch()
        self.prompts = root / "train.jsonl"
        self.held_out = root / "held.jsonl"
        for path in (self.prompts, self.held_out):
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")

    def config(self, config: Any) -> None:
        (self.model / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def spec(self, **groups: Any) -> Any:
        data: dict[str, Any] = {
            "name": "t",
            "policy": {"model": str(self.model)},
            "data": {"prompts": str(self.prompts), "held_out": str(self.held_out)},
            "rollout": {"batch_size": 4},
            "reward": {"sources": [{"kind": "sequence_classifier", "model": str(self.model)}]},
        }
        for name, value in groups.items():
            data[name] = {**data.get(name, {}), **value}
        return parse_spec(data)

    def faults(self, roots: list[Path] | None = None, **groups: Any) -> list[tuple[str, str]]:
        return [(fault.pointer, fault.message) for fault in check_files(self.spec(**groups), roots)]

    def only_fault(self, roots: list[Path] | None = None, **groups: Any) -> tuple[str, str]:
        (fault,) = self.faults(roots, **groups)
        return fault


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "root").mkdir()
    return Place(tmp_path / "root")


def test_a_good_spec_has_no_fault(place: Place) -> None:
    assert place.faults() == []
    assert place.faults(roots=[place.root]) == []
    assert place.faults(roots=[Path("/nowhere"), place.root]) == []


# Places


def test_every_missing_file_is_named(place: Place) -> None:
    found = place.faults(
        policy={"model": "/no/policy"},
        data={"prompts": "/no/train.jsonl", "held_out": "relative.jsonl"},
        reward={"sources": [{"kind": "sequence_classifier", "model": "/no/rm"}]},
    )
    assert [pointer for pointer, _ in found] == [
        "/policy/model",
        "/data/prompts",
        "/data/held_out",
        "/reward/sources/0/model",
    ]
    assert all("does not exist; give the path" in message for _, message in found)


def test_a_file_outside_the_roots_is_refused_whether_it_exists_or_not(place: Place, tmp_path: Path) -> None:
    outside = tmp_path / "outside.jsonl"
    outside.write_text(place.prompts.read_text(encoding="utf-8"), encoding="utf-8")
    for text in (str(outside), str(tmp_path / "absent.jsonl"), str(place.root / ".." / "outside.jsonl"), "/etc/passwd"):
        pointer, message = place.only_fault([place.root], data={"held_out": text})
        assert pointer == "/data/held_out"
        assert "outside the allowed folders" in message


def test_a_link_out_of_the_roots_is_refused(place: Place, tmp_path: Path) -> None:
    outside = tmp_path / "outside.jsonl"
    outside.write_text(place.prompts.read_text(encoding="utf-8"), encoding="utf-8")
    link = place.root / "link.jsonl"
    link.symlink_to(outside)
    assert "outside the allowed folders" in place.only_fault([place.root], data={"held_out": str(link)})[1]
    assert place.faults(data={"held_out": str(link)}) == []  # without roots links go anywhere


def test_a_linked_root_and_links_within_it_are_fine(place: Place, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(place.root)
    (place.root / "link.jsonl").symlink_to(place.held_out)
    assert place.faults([tmp_path / "alias"], data={"held_out": str(place.root / "link.jsonl")}) == []


def test_a_folder_whose_name_begins_like_a_root_is_outside(place: Place, tmp_path: Path) -> None:
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "held.jsonl").touch()
    assert "outside" in place.only_fault([place.root], data={"held_out": str(tmp_path / "root2" / "held.jsonl")})[1]


@pytest.mark.parametrize("name", ["loop", "x" * 300, "a/" * 500])
def test_a_path_that_cannot_be_followed_is_a_fault(place: Place, name: str) -> None:
    (place.root / "loop").symlink_to(place.root / "loop")
    pointer, _ = place.only_fault(data={"held_out": f"{place.root}/{name}"[:1000]})
    assert pointer == "/data/held_out"


# Model folders


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "null", "\ufeff{}", "[" * 100_000, "\x00"])
def test_a_folder_without_a_readable_config_is_no_model(place: Place, text: str) -> None:
    (place.model / "config.json").write_text(text, encoding="utf-8")
    found = place.faults()
    assert {pointer for pointer, _ in found} == {"/policy/model", "/reward/sources/0/model"}
    assert all("no readable config.json" in message for _, message in found)


def test_a_file_is_no_model_folder(place: Place) -> None:
    assert "no readable config.json" in place.only_fault(policy={"model": str(place.prompts)})[1]


def test_a_model_with_code_of_its_own_is_refused(place: Place) -> None:
    place.config({"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}, "max_position_embeddings": 128})
    assert all("brings its own code" in message for _, message in place.faults())
    assert len(place.faults()) == 2


def test_pickled_weights_alone_are_refused(place: Place) -> None:
    (place.model / "model.safetensors").rename(place.model / "pytorch_model.bin")
    assert all("no .safetensors file" in message for _, message in place.faults())
    assert len(place.faults()) == 2


# Context


@pytest.mark.parametrize(
    ("architecture", "tensors", "refused"),
    [
        ("LlamaForCausalLM", ["model.norm.weight", "lm_head.weight"], True),
        ("LlamaForCausalLM", ["model.norm.weight", "score.weight"], False),
        ("LlamaForSequenceClassification", ["model.norm.weight"], False),  # told as it is loaded
    ],
)
def test_a_language_model_gives_no_score(place: Place, architecture: str, tensors: list[str], refused: bool) -> None:
    folder = place.root / "reward"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    places = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]} for at, name in enumerate(tensors)
    }
    header = json.dumps(places).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * len(tensors)))
    faults = place.faults(reward={"sources": [{"kind": "sequence_classifier", "model": str(folder)}]})
    said = [message for pointer, message in faults if pointer == "/reward/sources/0/model"]
    assert len(said) == refused
    assert all("LlamaForCausalLM" in message and "name a sequence classifier" in message for message in said)


def test_prompt_and_response_must_fit_the_context(place: Place) -> None:
    pointer, message = place.only_fault(data={"max_prompt_tokens": 89})
    assert pointer == "/rollout/max_new_tokens"
    assert "89" in message
    assert "40" in message
    assert "129 exceed the context of 128 of" in message
    assert place.faults(data={"max_prompt_tokens": 88}) == []


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 5}, 5),
        ({"n_positions": 6}, 6),
        ({"n_ctx": 7}, 7),
        ({}, None),
        ({"n_ctx": "8"}, None),
    ],
)
def test_context_length_is_what_the_config_says(config: dict[str, Any], length: int | None) -> None:
    assert context_length(config) == length


# Prompts


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"prompt": "caf\xe9"}', "byte 15 is not UTF-8"),
        (b"\xff\xfe{\x00", "byte 0 is not UTF-8"),
        (b'{"prompt": "x"', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'["x"]', "an object with a text"),
        (b'"x"', "an object with a text"),
        (b"null", "an object with a text"),
        (b"NaN", "an object with a text"),
        (b"{}", "an object with a text"),
        (b'{"Prompt": "x"}', "an object with a text"),
        (b'{"prompt": null}', "an object with a text"),
        (b'{"prompt": 3}', "an object with a text"),
        (b'{"prompt": ["x"]}', "an object with a text"),
        (b'{"prompt": ""}', "the prompt is empty"),
        (b'{"prompt": " \\t\\n\\u00a0"}', "the prompt is empty"),
        (b'{"prompt": "half \\ud83d"}', "half of a surrogate pair"),
        (b'{"prompt": "\\udc00\\ud800"}', "half of a surrogate pair"),
        (json.dumps({"prompt": "x" * (MAX_PROMPT_CHARACTERS + 1)}).encode(), "1000001 characters"),
    ],
    ids=range(20),
)
def test_a_bad_row_is_named_by_its_number(place: Place, row: bytes, message: str) -> None:
    good = place.prompts.read_bytes()
    place.prompts.write_bytes(good + b"\n" + row + b"\n" + good)
    pointer, found = place.only_fault()
    assert pointer == "/data/prompts"
    assert found.startswith("train.jsonl, row 6: ")  # 4 good rows and a blank one before it
    assert message in found


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (b'{"prompt": "x", "rating": 3}\r\n', "x"),
        (b'{"prompt": "\\ud83d\\ude00"}', "\U0001f600"),
        ('{"prompt": "ä\u2028b"}'.encode(), "ä\u2028b"),
        (b'{"prompt": "a\\u0000b"}', "a\x00b"),
        (b'{"prompt": " x "}', " x "),
    ],
)
def test_an_odd_row_is_read_as_it_is(row: bytes, prompt: str) -> None:
    assert read_json_row(row) == prompt


def test_only_the_first_bad_rows_are_named(place: Place) -> None:
    place.prompts.write_text("{}\n" * 100, encoding="utf-8")
    found = place.faults()
    assert len(found) == MAX_FAULTS_A_FILE + 1
    assert "more than 10 bad rows" in found[-1][1]
    place.prompts.write_text("{}\n" * MAX_FAULTS_A_FILE, encoding="utf-8")
    assert len(place.faults()) == MAX_FAULTS_A_FILE


def test_fewer_prompts_than_a_batch_are_refused(place: Place) -> None:
    pointer, message = place.only_fault(rollout={"batch_size": 5})
    assert pointer == "/data/prompts"
    assert "4 prompts are fewer than rollout.batch_size 5" in message


def test_blank_lines_are_no_prompts(place: Place) -> None:
    place.prompts.write_text("\n \n" + place.prompts.read_text(encoding="utf-8") + "\n\n", encoding="utf-8")
    assert place.faults() == []
    assert place.faults(rollout={"batch_size": 5}) != []


def test_a_held_out_file_without_a_prompt_is_refused(place: Place) -> None:
    place.held_out.write_text("\n\n", encoding="utf-8")
    pointer, message = place.only_fault()
    assert pointer == "/data/held_out"
    assert "holds no prompt" in message


def test_a_folder_is_no_prompt_file(place: Place) -> None:
    assert "a folder without state.json" in place.only_fault(data={"prompts": str(place.root)})[1]


def test_a_hub_data_set_needs_the_servers_leave(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PPO_HUB_DATASETS", raising=False)
    pointer, message = place.only_fault(data={"prompts": "hub:films/reviews"}, roots=[place.root])
    assert pointer == "/data/prompts"
    assert "not one that this server fetches (none)" in message
    monkeypatch.setenv("PPO_HUB_DATASETS", "films/reviews")
    assert place.faults(data={"prompts": "hub:films/reviews", "held_out": "hub:films/reviews:test"}) == []
    assert "names no data set" in place.only_fault(data={"held_out": "hub:films"})[1]


@pytest.mark.parametrize("field", ["prompts", "held_out"])
def test_conversations_need_a_chat_template(place: Place, field: str) -> None:
    path = place.root / "chats.jsonl"
    path.write_text((json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n") * 4, encoding="utf-8")
    pointer, message = place.only_fault(data={field: str(path)})
    assert pointer == f"/data/{field}"
    assert "chats.jsonl, row 1: it holds `messages`" in message
    assert "has no chat template; save one with it (chat_template.jinja), or give texts" in message
    (place.model / "tokenizer_config.json").write_text('{"chat_template": null}', encoding="utf-8")
    assert place.faults(data={field: str(path)}) != []
    (place.model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}', encoding="utf-8")
    assert place.faults(data={field: str(path)}) == []
    (place.model / "tokenizer_config.json").unlink()
    (place.model / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert place.faults(data={field: str(path)}) == []


def test_every_format_is_checked_by_row(place: Place) -> None:
    """T41: the same rule wherever a prompt comes from."""
    path = place.root / "train.csv"
    path.write_bytes(b"prompt\nok\ncaf\xe9\n \nok\n")
    assert [message for _, message in place.faults(data={"prompts": str(path)})] == [
        "train.csv, row 3: a byte is not UTF-8",
        "train.csv, row 4: the prompt is empty",
    ]
    path = place.root / "train.parquet"
    path.write_bytes(b"PAR1")
    assert "train.parquet: it cannot be read: " in place.only_fault(data={"prompts": str(path)})[1]


def test_24_and_16_tokens_do_not_fit_32(place: Place) -> None:
    """T14: huggingface/trl#1867. Refused at submit, with all three numbers."""
    place.config({"model_type": "llama", "max_position_embeddings": 32})
    _, message = place.only_fault(data={"max_prompt_tokens": 24}, rollout={"max_new_tokens": 16})
    assert all(number in message for number in ("24", "16", "32"))
    assert place.faults(data={"max_prompt_tokens": 16}, rollout={"max_new_tokens": 16}) == []


@pytest.mark.parametrize(("num_prompts", "refused"), [(0, True), (3, True), (8, False), (9, False)])
def test_a_batch_needs_as_many_prompts(place: Place, num_prompts: int, refused: bool) -> None:
    """T12: OpenRLHF/OpenRLHF#1297. The ninth is used: see the prompt source's tests."""
    place.prompts.write_text('{"prompt": "x"}\n' * num_prompts, encoding="utf-8")
    found = place.faults(rollout={"batch_size": 8})
    assert [pointer for pointer, _ in found] == (["/data/prompts"] if refused else [])


# Registered functions


def test_functions_that_are_not_registered_are_refused_with_those_that_are(place: Place) -> None:
    found = dict(
        place.faults(
            reward={"sources": [{"kind": "python", "name": "os.system"}]},
            gate={"judge": {"kind": "python", "name": "no-such-judge"}},
        )
    )
    assert "no reward function 'os.system' is registered (known: " in found["/reward/sources/0/name"]
    assert "no judge 'no-such-judge' is registered (known: " in found["/gate/judge/name"]


# Hosts and chat templates of scorers

SERVICE = {"kind": "http", "url": "https://rewards.example/score"}


def test_a_host_that_is_not_allowed_is_refused_for_rewards_and_judges(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {
        "reward": {"sources": [SERVICE]},
        "gate": {"judge": {"kind": "http", "url": "http://127.0.0.1:9/"}},
    }
    spec = place.spec(**groups)
    found = {fault.pointer: fault.message for fault in check_files(spec, hosts=RewardHosts())}
    assert "'rewards.example', port 443, is not allowed here" in found["/reward/sources/0/url"]
    assert "add it to PPO_REWARD_HOSTS" in found["/gate/judge/url"]
    assert check_files(spec, hosts=RewardHosts.parse("rewards.example,127.0.0.1")) == []


def test_a_host_that_is_not_allowed_is_refused_for_servers_that_generate(place: Place) -> None:
    servers = ["http://vllm-0:8000", "https://rewards.example"]
    spec = place.spec(rollout={"engine": "vllm", "vllm": {"servers": servers}})
    both = RewardHosts.parse("vllm-0,rewards.example")  # of scorers, which is another list
    found = check_files(spec, hosts=both, engine_hosts=EngineHosts.parse("vllm-0:8000"))
    assert [fault.pointer for fault in found] == ["/rollout/vllm/servers/1"]
    assert "add it to PPO_ENGINE_HOSTS" in found[0].message
    assert check_files(spec, engine_hosts=EngineHosts.parse("vllm-0:8000,rewards.example:443")) == []


def test_hosts_are_those_of_the_environment_when_none_are_given(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PPO_REWARD_HOSTS", raising=False)
    assert place.only_fault(reward={"sources": [SERVICE]})[0] == "/reward/sources/0/url"
    monkeypatch.setenv("PPO_REWARD_HOSTS", "rewards.example")
    assert place.faults(reward={"sources": [SERVICE]}) == []
    monkeypatch.setenv("PPO_REWARD_HOSTS", "http://rewards.example")
    assert "is no entry" in place.only_fault(reward={"sources": [SERVICE]})[1]
    assert place.faults() == []  # a spec that asks nobody does not need the list


def test_a_chat_template_has_to_be_there(place: Place) -> None:
    source = {"kind": "sequence_classifier", "model": str(place.model), "chat_template": True}
    pointer, message = place.only_fault(reward={"sources": [source]})
    assert pointer == "/reward/sources/0/chat_template"
    assert "has no chat template; give `template` instead" in message
    config = place.model / "tokenizer_config.json"
    for text in ("[]", "{", '{"chat_template": null}'):
        config.write_text(text)
        assert place.only_fault(reward={"sources": [source]})[0] == "/reward/sources/0/chat_template"
    config.write_text('{"chat_template": "{{ messages }}"}')
    assert place.faults(reward={"sources": [source]}) == []
    config.unlink()
    (place.model / "chat_template.jinja").touch()
    assert place.faults(reward={"sources": [source]}) == []
