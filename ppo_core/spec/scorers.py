"""The groups of a run spec that say who gives a response a number: reward sources, their sum, and the judge."""

from __future__ import annotations

from posixpath import normpath
from typing import Literal, Self, get_args
from urllib.parse import unquote

from pydantic import field_validator, model_validator

from ppo_core.spec.hosts import Endpoint, parse_endpoint
from ppo_core.spec.setting import Group, Misfits, PathText, setting
from ppo_core.spec.text_template import TextTemplate

# Through two responses a line always fits: all they differ by would be taken for length.
MIN_ROWS_FOR_SLOPE = 3

# Entry point groups of functions that score.
REWARD_FUNCTIONS = "ppo_core.rewards"
JUDGE_FUNCTIONS = "ppo_core.judges"

# What each kind of scorer takes.
SCORER_FIELDS = {
    "sequence_classifier": ("model", "template", "chat_template"),
    "python": ("name",),
    "http": ("url", "batch_size", "retries"),
    "openai": (
        "served_model", "url", "question", "answer_tokens", "at_once", "retries", "request_timeout_s", "timeout_s",
    ),
}  # fmt: skip

# Those among them that a kind cannot do without.
NEEDED_FIELDS = ("model", "name", "url", "served_model")

# A connection to "any address" goes to this machine.
THIS_MACHINE = ("127.0.0.1", "::1", "0.0.0.0", "::")

# What a judge by comparison is asked, unless the spec says otherwise.
QUESTION = "Which response to the prompt is better?"


class Scorer(Group):
    """Whoever says what a response is worth: what reward sources and judges have in common."""

    kind: Literal["sequence_classifier", "python", "http", "openai"] = setting(
        ...,
        "rollback",
        "`sequence_classifier`: a Hugging Face model with one output; `python`: a registered function; `http`: a "
        "service that is posted prompts and responses.",
    )
    model: PathText | None = setting(None, "rollback", "Folder of the sequence classifier.", path=True)
    template: str | None = setting(
        None,
        "rollback",
        "Text that the sequence classifier reads, with `{prompt}` and `{response}` in it; null: one after the other.",
        min_length=1,
        max_length=4096,
        pattern=r"^[^\x00-\x08\x0b-\x1f]+$",
    )
    chat_template: bool = setting(
        False,
        "rollback",
        "The sequence classifier reads prompt and response as a user's and an assistant's turn, by the chat template "
        "of its own tokenizer.",
    )
    name: str | None = setting(
        None, "rollback", "Registered name of the Python function.", min_length=1, max_length=128, pattern=r"^[\w.\-]+$"
    )
    url: str | None = setting(
        None,
        "rollback",
        "Address of the service, http or https, of a host in PPO_REWARD_HOSTS. See docs/reward-sources.md.",
        min_length=1,
        max_length=1024,
    )
    batch_size: int = setting(64, "rollback", "Responses in one request to the service.", ge=1, le=4096)
    retries: int = setting(
        3, "rollback", "Further tries of a request that failed, as far as the time for a batch allows.", ge=0, le=10
    )

    @field_validator("template")
    @classmethod
    def _template_can_be_filled(cls, text: str | None) -> str | None:
        if text is not None:
            TextTemplate.parse(text)
        return text

    @field_validator("url")
    @classmethod
    def _url_is_plain(cls, text: str | None) -> str | None:
        if text is not None:
            parse_endpoint(text)
        return text

    @property
    def identity(self) -> tuple[str, object]:
        """What makes two scorers the same one, however it is asked and its address is spelled."""
        return self.kind, place_of(parse_endpoint(self.url)) if self.url is not None else self.model or self.name

    @model_validator(mode="after")
    def _kind_has_what_it_takes(self) -> Self:
        own, fields = SCORER_FIELDS[self.kind], type(self).model_fields
        misfits = []
        for needed in own:
            if getattr(self, needed) is None and needed in NEEDED_FIELDS:
                misfits.append(("", f"a scorer of kind {self.kind} takes `{needed}`, which is missing"))
        for field in dict.fromkeys(name for names in SCORER_FIELDS.values() for name in names):
            if field in fields and field not in own and getattr(self, field) != fields[field].default:
                kinds = get_args(fields["kind"].annotation)
                takers = " or ".join(kind for kind in kinds if field in SCORER_FIELDS[kind])
                misfits.append((f"/{field}", f"`{field}` is for kind {takers}, and this is {self.kind}; leave it out"))
        if self.template is not None and self.chat_template:
            misfits.append(("/template", "template and chat_template exclude each other; leave one out"))
        if misfits:
            raise Misfits(misfits)
        return self


class RewardSource(Scorer):
    """One scorer of responses, and what it counts."""

    kind: Literal["sequence_classifier", "python", "http"] = setting(
        ...,
        "rollback",
        "`sequence_classifier`: a Hugging Face model with one output; `python`: a registered function; `http`: a "
        "service that is posted prompts and responses.",
    )
    weight: float = setting(1.0, "rollback", "Factor of this source in the sum.", ge=-1000, le=1000)


class RewardConfig(Group):
    """How a response becomes one score."""

    sources: list[RewardSource] = setting(
        ..., "rollback", "Scorers; the score is their weighted sum.", min_length=1, max_length=16
    )
    missing_eos_penalty: float = setting(
        -1.0,
        "rollback",
        "Added to the score of a response cut off at max_new_tokens, after `normalize`; zero or negative.",
        ge=-1000,
        le=0,
    )
    length_baseline: Literal["none", "linear"] = setting(
        "none",
        "rollback",
        "`linear`: slope · (length − mean length) is taken from each score, with the iteration's least-squares slope.",
    )
    normalize: bool = setting(
        False,
        "rollback",
        "The score minus the running mean, over the running deviation, of all scores so far; penalty and clip then "
        "count in standard deviations.",
    )
    clip: float | None = setting(
        None, "rollback", "The score is limited to ± this, after penalty and `normalize`.", gt=0, le=1e6
    )
    timeout_s: float = setting(
        60.0, "rollback", "Seconds that one source may take for the scores of a batch.", gt=0, le=3600
    )
    fallback: float | None = setting(
        None,
        "rollback",
        "Score that a response without a usable one is trained with; null: it is left out. It counts as unusable "
        "either way.",
        ge=-1e6,
        le=1e6,
    )
    max_invalid_share: float = setting(
        0.1, "rollback", "Share of unusable scores in an iteration above which the run fails.", ge=0, lt=1
    )


class JudgeConfig(Scorer):
    """An evaluator that is not the training reward. It scores each answer, or compares two at a time (`openai`)."""

    kind: Literal["sequence_classifier", "python", "http", "openai"] = setting(
        ...,
        "rollback",
        "`sequence_classifier`, `python` and `http` score answers as reward sources do; `openai`: a model behind an "
        "OpenAI-compatible endpoint says of two answers which is better.",
    )
    url: str | None = setting(
        None,
        "rollback",
        "Address of the service, http or https, of a host in PPO_REWARD_HOSTS; of an OpenAI-compatible one all that "
        "stands before /chat/completions. See docs/judge-gate.md.",
        min_length=1,
        max_length=1024,
    )
    retries: int = setting(
        3, "rollback", "Further tries of a request that failed, as far as the time for all allows.", ge=0, le=10
    )
    served_model: str | None = setting(
        None,
        "rollback",
        "Name by which the OpenAI-compatible endpoint knows the model that compares.",
        min_length=1,
        max_length=256,
        pattern=r"^[^\x00-\x1f\x7f]+$",
    )
    question: str = setting(
        QUESTION,
        "rollback",
        "What that model is asked about two responses, in a sentence or more.",
        min_length=1,
        max_length=4096,
        pattern=r"^[^\x00-\x08\x0b-\x1f]+$",
    )
    answer_tokens: int = setting(
        16, "rollback", "Most tokens of its answer, which is one word; more for a model that thinks aloud.", ge=1,
        le=32768,
    )  # fmt: skip
    at_once: int = setting(8, "rollback", "Comparisons under way at the same time.", ge=1, le=256)
    request_timeout_s: float = setting(
        60.0, "rollback", "Seconds after which one comparison is given up and tried again.", gt=0, le=600
    )
    timeout_s: float = setting(
        300.0, "rollback", "Seconds that all comparisons with one policy may take; a gate has two.", gt=0, le=600
    )


def place_of(endpoint: Endpoint) -> tuple[str, int, str]:
    """Host, port and path of an address; the spellings of one place, as far as they can be told without asking, are
    one."""
    address = endpoint.address
    here = endpoint.host == "localhost" or (address is not None and str(address) in THIS_MACHINE)
    port = 443 if endpoint.port == 80 else endpoint.port  # One service by http and by https.
    path = normpath("/" + unquote(endpoint.path).lstrip("/"))  # Servers merge slashes and take `.` and `..` out.
    return "localhost" if here else endpoint.host.rstrip("."), port, path
