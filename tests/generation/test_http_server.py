"""OpenAI's API over a model: answers that the `openai` package reads, and requests that are refused."""

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_model import write_chat_model
from fewer import every

from te_models import CausalLM, load_tokenizer
from te_models.data.tokenizer_base import Tokenizer
from te_models.errors import TeModelsError, UsageError
from te_models.generation.completions import Completions, Ended
from te_models.generation.http_server import Server, is_local, make_server

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return CausalLM.from_pretrained(folder, device="cpu", recipe="current").eval()


@pytest.fixture(scope="module")
def words(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def server(model: CausalLM, words: Tokenizer, notes: list[str]) -> Iterator[Server]:
    with make_server(model, words, "mine", port=0, note=notes.append) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs=dict(poll_interval=0.01))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    # Closed, not left to a search for cycles, which warns of the open connection in whichever test it happens.
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def expected(model: CausalLM, words: Tokenizer, ids: list[int], count: int) -> tuple[str, int]:
    """Return the greedy answer by `generate`, and the number of its tokens."""
    new = model.generate([ids], count)[0, len(ids) :].tolist()
    # 258 ends a turn; it is counted, but no part of the answer.
    stop = new.index(258) if 258 in new else len(new)
    return words.decode(new[:stop]), min(len(new), stop + 1)


def test_models(client: Any) -> None:
    assert [found.id for found in client.models.list()] == ["mine"]
    assert client.models.retrieve("mine").owned_by == "te-models"


@pytest.mark.parametrize("name", ["my run", "owner/model", "mod\u00e8le", "50%"])
def test_models_whose_names_a_path_cannot_hold(
    name: str, model: CausalLM, words: Tokenizer
) -> None:
    openai = pytest.importorskip("openai")
    with make_server(model, words, name, port=0) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs=dict(poll_interval=0.01))
        thread.start()
        try:
            with openai.OpenAI(base_url=made.url, api_key="none", max_retries=0) as client:
                assert client.models.retrieve(client.models.list().data[0].id).id == name
        finally:
            made.shutdown()
            thread.join()


@pytest.mark.parametrize("count", [1, 7, 20])
def test_a_chat_answer_is_the_models(
    count: int, client: Any, model: CausalLM, words: Tokenizer, notes: list[str]
) -> None:
    ids = words.apply_chat_template(HELLO)
    text, tokens = expected(model, words, ids, count)
    asked: dict[str, Any] = dict(model="mine", messages=HELLO, max_tokens=count, temperature=0)
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == text and whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == ("length" if tokens == count else "stop")
    used = (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens)
    assert used == (len(ids), tokens, len(ids) + tokens)
    options = dict(include_usage=True)
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == text
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert pieces[-1].usage == whole.usage and len({p.id for p in pieces}) == 1
    assert len(pieces) > min(count, 3)
    deadline = time.monotonic() + 10
    while len(notes) < 2 and time.monotonic() < deadline:  # each is written once its answer is sent
        time.sleep(0.01)
    assert len(notes) == 2 and f"/v1/chat/completions: {tokens} token" in notes[0]


def test_a_chat_answer_may_use_all_of_the_context(client: Any, model: CausalLM) -> None:
    answer = client.chat.completions.create(model="mine", messages=HELLO, temperature=0)
    assert answer.usage.total_tokens <= 96
    assert answer.choices[0].finish_reason == "stop" or answer.usage.total_tokens == 96


def test_completions_of_texts_and_ids(client: Any, model: CausalLM, words: Tokenizer) -> None:
    for prompt in ("once", list(b"once")):
        ids = words.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        answer = client.completions.create(model="mine", prompt=prompt, temperature=0, max_tokens=5)
        assert answer.choices[0].text == expected(model, words, ids, 5)[0]
    several = client.completions.create(
        model="mine", prompt=["once", "twice"], temperature=0, max_tokens=5, n=2
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in several.choices]
    assert texts[0] == texts[1] == answer.choices[0].text or words.encode_prompt("once") != ids
    for number, prompt in enumerate(("once", "twice")):
        assert texts[2 * number] == expected(model, words, words.encode_prompt(prompt), 5)[0]
    assert several.usage.completion_tokens <= 20
    assert client.completions.create(model="mine", prompt="a").usage.completion_tokens <= 16


def test_sampling_follows_the_seed(client: Any) -> None:
    def texts(**options: Any) -> list[str]:
        fields = dict(model="mine", prompt="once", max_tokens=12, n=2, extra_body=dict(top_k=50))
        found = client.completions.create(**fields, **options)
        return [choice.text for choice in found.choices]

    assert texts(seed=3) == texts(seed=3) != texts(seed=8)
    assert len(set(texts(seed=3, temperature=2))) == 2
    assert len(set(texts(seed=3, temperature=0))) == 1, "the likeliest tokens need none"


def test_a_stop_string_ends_the_answer(client: Any, model: CausalLM, words: Tokenizer) -> None:
    text, _ = expected(model, words, words.encode_prompt("once"), 12)
    stop = text[3:5]
    answer = client.completions.create(
        model="mine", prompt="once", max_tokens=12, temperature=0, stop=[stop]
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_messages_may_have_parts_and_template_variables(client: Any, words: Tokenizer) -> None:
    asked: dict[str, Any] = dict(model="mine", max_tokens=1, temperature=0)
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    one = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **asked)
    assert one.usage.prompt_tokens == len(words.apply_chat_template(HELLO))
    extra = dict(chat_template_kwargs=dict(enable_thinking=False))
    other = client.chat.completions.create(messages=HELLO, extra_body=extra, **asked)
    thinking = words.apply_chat_template(HELLO, enable_thinking=False)
    assert other.usage.prompt_tokens == len(thinking) > one.usage.prompt_tokens


MISTAKES = [
    (dict(max_tokens=200), "are more than max_position_embeddings=96"),
    (dict(messages=[{"role": "user", "content": "a" * 200}]), "are more than"),
    (dict(temperature=-1), "temperature=-1.0 is negative: give a positive number, or 0"),
    (dict(top_p=2), "top_p=2 is not a probability"),
    (dict(n=0), "n=0 is out of range: give 1 to 16"),
    (dict(max_tokens=0), "max_tokens=0 is out of range"),
    (dict(max_tokens="many"), "max_tokens is of a wrong type: give a whole number"),
    (dict(logprobs=True), "logprobs is not supported here: leave it out"),
    (dict(tools=[dict(type="function", function=dict(name="f"))]), "tools is not supported"),
    (dict(response_format=dict(type="json_object")), "response_format is not supported"),
    (dict(presence_penalty=0.5), "presence_penalty is not supported"),
    (dict(messages=[]), "messages is missing"),
    (dict(messages=[{"role": "user"}]), r"messages\[0\] has no text"),
    (dict(messages=["hi"]), r"messages\[0\] is no object"),
    (dict(messages=[{"role": "user", "content": ""}]), "say something"),
    (
        dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        "has a part that is no text",
    ),
    (dict(stop=[3]), "stop is of a wrong type"),
    (dict(seed="x"), "seed is of a wrong type"),
]


@pytest.mark.parametrize(("mistake", "stream"), every(2, MISTAKES, [False, True]))
def test_a_mistake_is_one_line(mistake: tuple[dict, str], stream: bool, client: Any) -> None:
    fields, message = mistake
    import openai  # noqa: PLC0415  the fixture has skipped where it is missing

    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(
            **{**dict(model="mine", messages=HELLO), **fields}, stream=stream
        )


@pytest.mark.parametrize(
    "fields, message",
    [
        # A completion's 0 asks for the log-probabilities of the chosen tokens; it is not False.
        (dict(logprobs=0), "logprobs is not supported here: leave it out"),
        (dict(repetition_penalty=1.2), "repetition_penalty is not supported here: leave it out"),
        (dict(min_tokens=3), "min_tokens is not supported here: leave it out"),
        (dict(max_new_tokens=3), "unknown field 'max_new_tokens'.* did you mean 'max_tokens'"),
        (dict(temprature=0), "unknown field 'temprature'.* did you mean 'temperature'"),
        (dict(prompt="a\ud800"), "prompt holds half of a surrogate pair at character 1"),
    ],
)
def test_a_field_that_would_be_ignored_is_refused(
    fields: dict[str, Any], message: str, model: CausalLM, words: Tokenizer
) -> None:
    with pytest.raises(TeModelsError, match=message):
        Completions(model, words, "mine").read({"prompt": "once", **fields}, chat=False)


def test_the_messages_are_no_variable_of_the_template(model: CausalLM, words: Tokenizer) -> None:
    fields = dict(messages=HELLO, chat_template_kwargs=dict(messages=[]))
    with pytest.raises(TeModelsError, match="messages is the conversation and no variable"):
        Completions(model, words, "mine").read(fields, chat=True)


def test_the_end_of_a_server_ends_its_answer(model: CausalLM, words: Tokenizer) -> None:
    with make_server(model, words, "mine", port=0) as server:
        completions = server.completions
        request = completions.read(dict(prompt="once", max_tokens=60, temperature=0), chat=False)
        answer = completions.pieces(request)
        next(answer)
        closing = threading.Thread(target=server.server_close)
        closing.start()
        closing.join(timeout=0.1)
        assert closing.is_alive()  # the model is in the middle of an answer
        with pytest.raises(Ended):
            for _ in answer:
                pass
        closing.join(timeout=10)
        assert not closing.is_alive()
        with pytest.raises(Ended):
            next(completions.pieces(request))


def test_the_end_of_a_server_ends_its_connections(model: CausalLM, words: Tokenizer) -> None:
    """A client that keeps its connection open must not leave a thread that runs while Python ends."""
    before = set(threading.enumerate())
    with make_server(model, words, "mine", port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=0.01))
        thread.start()
        client = http.client.HTTPConnection("127.0.0.1", server.server_address[1])
        client.request("GET", "/health")
        client.getresponse().read()
        assert len(set(threading.enumerate()) - before) == 2
        server.shutdown()
        thread.join()
    assert set(threading.enumerate()) <= before
    client.close()


def test_fields_that_change_no_answer_are_taken(model: CausalLM, words: Tokenizer) -> None:
    neutral = dict(store=False, service_tier="auto", prompt_cache_key="a", repetition_penalty=1.0)
    read = Completions(model, words, "mine").read
    fields = {"prompt": "once", "max_tokens": 3}
    assert read({**fields, **neutral, "logprobs": False}, chat=False) == read(fields, chat=False)


def test_neutral_and_unknown_fields_are_taken(client: Any) -> None:
    answer = client.chat.completions.create(
        model="mine",
        messages=HELLO,
        max_completion_tokens=2,
        user="me",
        presence_penalty=0,
        logprobs=False,
        response_format=dict(type="text"),
        extra_body=dict(top_k=-1, min_p=0.0, something="else"),
    )
    assert answer.usage.completion_tokens <= 2


def test_another_model_is_not_found(client: Any) -> None:
    import openai  # noqa: PLC0415  as above

    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here: give 'mine'"):
        client.chat.completions.create(model="gpt", messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_many_clients_get_their_own_answers(client: Any, model: CausalLM, words: Tokenizer) -> None:
    prompts = [f"{number} times" for number in range(6)]

    def ask(prompt: str) -> str:
        fields = dict(model="mine", prompt=prompt, max_tokens=8, temperature=0)
        return client.completions.create(**fields).choices[0].text

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, prompts))
    assert found == [expected(model, words, words.encode_prompt(p), 8)[0] for p in prompts]


def test_a_client_that_leaves_frees_the_model(client: Any, model: CausalLM) -> None:
    """Its answer ends, and the next one begins."""
    before = model.training
    for _ in range(3):
        stream = client.chat.completions.create(model="mine", messages=HELLO, stream=True)
        next(iter(stream))
        stream.close()
    answer = client.chat.completions.create(model="mine", messages=HELLO, max_tokens=2)
    assert answer.choices and model.training == before


def raw(
    server: Server, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None and "Content-Type" not in given:
        given["Content-Type"] = "application/json"
    connection.request(method, path, body, given)
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content


def test_requests_that_are_no_requests(server: Server) -> None:
    path = "/v1/chat/completions"
    for body, line in (
        ("{", "the request is not strict JSON"),
        ("[]", "the request is no JSON object"),
        ("[" * 50_000, "nested too deeply|not strict JSON|more than"),
        ('{"messages": NaN}', "not strict JSON"),
    ):
        status, answer = raw(server, "POST", path, body)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"
        assert re.search(line, answer["error"]["message"]), answer
    assert raw(server, "POST", "/v1/embeddings", "{}")[0] == 404
    assert raw(server, "GET", "/")[0] == 404
    assert raw(server, "GET", "/health") == (200, {})
    assert raw(server, "POST", path, "{}", Content_Length="999999999")[0] == 413
    # A page of another site can neither send JSON nor name this machine.
    assert raw(server, "POST", path, "{}", Content_Type="text/plain")[0] == 415
    assert raw(server, "GET", "/v1/models", Host="evil.example")[0] == 403
    assert raw(server, "GET", "/v1/models", Host="localhost:80")[0] == 200
    assert raw(server, "GET", "/v1/models", Host="[::1]:80")[0] == 200


def test_a_tokenizer_without_a_template_has_no_chat(model: CausalLM) -> None:
    plain = load_tokenizer(None)
    with make_server(model, plain, port=0) as made:
        completions = made.completions
        with pytest.raises(ValueError, match="have no chat template"):
            completions.read(dict(messages=HELLO), chat=True)
        assert completions.whole(completions.read(dict(prompt="a", max_tokens=1), chat=False))


def test_a_port_in_use_is_one_line(server: Server, model: CausalLM, words: Tokenizer) -> None:
    port = server.server_address[1]
    with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port} .*: give another"):
        make_server(model, words, port=port)


@pytest.mark.parametrize(
    "host, local",
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("192.168.0.2", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_local_addresses(host: str, local: bool) -> None:
    assert is_local(host) == local


def test_the_model_keeps_its_scales(client: Any, model: CausalLM) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    client.completions.create(model="mine", prompt="once", max_tokens=3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
