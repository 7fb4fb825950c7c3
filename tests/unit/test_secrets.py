"""Tests secrets by name, by look and by value, in time that grows with the text's length alone."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulysses_cli.plan.secrets import MASK, collect_secrets, mask_document, mask_secrets, mask_text

VALUE = "correct-horse/battery staple"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA7\nq1w2e3r4t5y6u7i8\n-----END RSA PRIVATE KEY-----"
ACCOUNT = json.dumps({"type": "service_account", "private_key": PEM, "client_email": "someone@here"})


def test_a_variable_is_a_secret_by_its_name() -> None:
    output = f"a {VALUE} in {json.dumps(VALUE)} and https://x/{VALUE.replace('/', '%2F').replace(' ', '%20')}"
    names = "HF_TOKEN HF_TOKEN_2 AWS_ACCESS_KEY_ID GPG_PASSPHRASE AZURE_DEVOPS_PAT DB_PWD SMTP_PASS PROXY_AUTH PASS"
    names += " STORAGE_CONNECTION_STRING SLACK_WEBHOOK_URL GCP_CREDENTIALS_JSON REDIS_PASSWORD"
    for name in names.split():
        assert "battery" not in mask_text(output, collect_secrets({}, {name: VALUE})), name
    for name in ["PWD", "OLDPWD", "PATH", "HF_TOKEN_PATH", "SSH_AUTH_SOCK", "GIT_AUTHOR", "COMPASS"]:
        assert collect_secrets({}, {name: VALUE}) == frozenset(), name


def test_a_value_of_several_lines_is_known_by_each() -> None:
    """Logs are masked line by line, and JSON writes a line's end in another way."""
    for name, value in (("SSH_KEY", PEM), ("GCP_CREDENTIALS_JSON", ACCOUNT)):
        known = collect_secrets({}, {name: value})
        for text in (PEM, json.dumps(PEM), *PEM.splitlines(), repr(PEM)):
            assert "q1w2e3" not in mask_text(text, known), (name, text)
            assert "MIIEow" not in mask_text(text, known), (name, text)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "dXNl"),
        ('{"authorization": "Basic dXNlcjpwYXNzd29yZA=="}', "dXNl"),
        ("authorization: token 12345abcdef", "12345"),
        ("curl -H 'authorization: bearer abcdef.123456'", "abcdef"),
        ("sent bearer abcdef123456 to", "abcdef"),
        ("npm_abcdefghij0123456789", "abcdefghij"),
        ("nvapi-AbCd_1234-xyz", "AbCd"),
        ("pypi-AgEIcHlwaS5vcmcCJDY1", "AgEI"),
        ("postgres://me:pa/ss:wo@rd@host:5432/db", "rd@"),
        ("https://me:pa/ss@host/x", "pa/ss"),
        ("https://p4ssw0rd@host/x", "p4ss"),
        ("https://x/?a=1&X-Amz-Signature=deadbeef&v=2", "deadbeef"),
        (PEM, "MIIE"),
    ],
)
def test_a_secret_is_known_by_its_look(text: str, secret: str) -> None:
    assert secret in text
    masked = mask_text(text)
    assert secret not in masked
    assert MASK in masked
    assert json.loads(mask_text(json.dumps({"a": text, "b": 1})))["b"] == 1  # JSON stays JSON


def test_other_words_are_not_masked() -> None:
    words = ("the bearer of news", "npm_config_cache", "pypi-publish", "basic usage", "https://host/a?b=c")
    for text in (*words, "num_tokens: 5", "http://localhost:29400/x", "model.tokenizer: bytes"):
        assert mask_text(text) == text


def test_names_of_settings() -> None:
    hidden = {"api_key": "a", "db_pwd": "b", "smtp_pass": "c", "x_auth": "d", "gpg_passphrase": "e", "pin_pass": 12345}
    hidden |= {"hf_token": "abc", "HF_TOKEN": "abc", "wandb_api_key": "abc", "apiKey": 12345, "password": 12345}
    shown = {"path": "Qwen/Qwen3-8B", "author": "b", "pad_token_id": 0, "tokenizer": "bytes", "num_tokens": 4}
    shown |= {"tokenizers": "0.22.1", "num_key_value_heads": 8, "max_tokens": 4096, "enabled_token": True}
    shown |= {"url": "https://host/x?v=1"}
    assert mask_secrets({**hidden, **shown}) == {**dict.fromkeys(hidden, MASK), **shown}
    assert mask_secrets({"client_secret": ["a", "b"]}) == {"client_secret": [MASK, MASK]}
    token = "hf_QwErTyUiOpAsDfGhJkLzXcVb"
    assert mask_secrets([{"secrets": {"a": {"b": "x"}}, token: 1}]) == [{"secrets": {"a": {"b": MASK}}, MASK: 1}]


def test_a_document_is_masked_across_its_parts() -> None:
    parts, count = mask_document(["my hf_abc", "defghijkl is", " password = hunter2hunter2 ok"])
    assert ("".join(parts), count) == ("my ****** is password = *** ok", 2)


@given(st.text(alphabet="?&=/:@ tokenkyhf_a-.\"'", max_size=200), st.integers(1, 4))
def test_masking_is_quick_and_complete(text: str, times: int) -> None:
    started = time.process_time()
    masked = mask_text(text * times)
    mask_text(text * 100)
    assert time.process_time() - started < 2
    assert len(mask_document([masked])[0]) == 1


@pytest.mark.parametrize(
    "text", ["?token", "://a:", "bearer ", "authorization:", "password", "-----BEGIN PRIVATE KEY-----", "hf_"]
)
def test_a_text_made_to_slow_down_masking(text: str) -> None:
    started = time.process_time()
    mask_document([text * ((1 << 17) // len(text))])
    assert time.process_time() - started < 4
