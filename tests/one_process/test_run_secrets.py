"""Tests that planted secrets reach neither run.json nor the model card, which people publish."""

from pathlib import Path

from support.small_run import CONFIG
from support.training import make_recipe

from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.train.record import make_card, write_run_file

SHAPE = read_model_shape(CONFIG, "test")
SECRETS = ("hf_abcdefghijklmnop", "sk-proj-1234567890", "p4ssw0rd")


def test_secrets_of_a_recipe_are_masked(tmp_path: Path) -> None:
    recipe = make_recipe(
        f"deepspeed.comms_logger.api_key={SECRETS[0]}",
        f"deepspeed.elasticity.note=Bearer {SECRETS[1]}",
        f"run.run_name=https://me:{SECRETS[2]}@host/x",
    ).model_dump(mode="json")
    assert all(secret in str(recipe) for secret in SECRETS)
    write_run_file(tmp_path, {"recipe": recipe, "run_name": recipe["run"]["run_name"]})
    written = (tmp_path / "run.json").read_text() + make_card(recipe, "name", SHAPE, SHAPE.vocab_size)
    assert not [secret for secret in SECRETS if secret in written]
    assert "learning_rate: 0.003" in written
    assert '"tokenizer": "bytes"' in written
