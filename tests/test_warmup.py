"""Base policies: real folders, the same from the same seed, made once, and never half made."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollyard.config import Config
from rollyard.errors import ConfigError
from rollyard.model.architecture import Architecture
from rollyard.model.tokenizer import Tokenizer
from rollyard.prompts.tasks.task import TASKS
from rollyard.warmup import architecture, base_policy

SMALL = {"steps": 3, "batch": 8, "width": 32, "feed_forward": 64, "heads": 2, "layers": 1}


def config(task: str = "sort", **warmup) -> Config:
    return Config.model_validate({"prompts": {"task": task}, "warmup": SMALL | warmup})


def quiet(text: str) -> None:
    pass


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_the_same_seed_gives_the_same_policy_and_another_seed_another(tmp_path):
    first = base_policy(config(), tmp_path / "a", quiet)
    again = base_policy(config(), tmp_path / "b", quiet)
    other = base_policy(config(seed=1), tmp_path / "a", quiet)
    assert first.name == again.name != other.name
    ours, theirs, others = weights(first), weights(again), weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["model.embed_tokens.weight"], others["model.embed_tokens.weight"])


def test_it_is_made_once(tmp_path):
    told: list[str] = []
    folder = base_policy(config(), tmp_path, told.append)
    assert told == [f"making the base policy of sort: {step} of 3 steps" for step in (0, 1, 2)]
    assert base_policy(config(), tmp_path, told.append) == folder and len(told) == 3
    for changed in (config(lr=1e-4), config(steps=2), config("reverse")):
        assert base_policy(changed, tmp_path, quiet) != folder


def test_what_stops_it_leaves_nothing_behind(tmp_path):
    def stop(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        base_policy(config(), tmp_path, stop)
    assert list(tmp_path.iterdir()) == []


def test_another_run_that_made_it_meanwhile_is_no_error(tmp_path):
    def meanwhile(text: str) -> None:
        if not any(tmp_path.iterdir()):
            base_policy(config(), tmp_path, quiet)

    folder = base_policy(config(), tmp_path, meanwhile)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", TASKS)
def test_it_is_a_hugging_face_folder_that_spells_its_task(tmp_path, name):
    folder = base_policy(config(name), tmp_path, quiet)
    model, full = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "llama" and model.generation_config.eos_token_id == full.eos_token_id == 0
    assert Architecture.from_folder(folder) == architecture(config(name))
    tokenizer = Tokenizer(folder)
    for index in range(50):
        problem = TASKS[name].problem(0, index)
        for text in (problem.prompt, problem.answer):
            ids = tokenizer.encode(text)
            assert len(ids) == len(text) and not {0, 1} & set(ids)
            assert tokenizer.decode(ids) == text and full.decode(ids) == text
    hidden = [token for token in range(len(full)) if not tokenizer.decode([token])]
    assert hidden == [0]  # only the end of a sequence has no text, so no stray token passes for a right answer


def test_it_learns_the_task(tmp_path):
    """Supervised steps lower the loss of problems it has not seen, as transformers computes it."""

    def loss(steps: int) -> float:
        folder = base_policy(config(steps=steps, batch=32, lr=1e-2, width=64), tmp_path, quiet)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), Tokenizer(folder)
        losses = []
        for index in range(20):
            problem = TASKS["sort"].problem(0, index, held_out=True)
            prompt = tokenizer.encode(problem.prompt)
            ids = torch.tensor([prompt + tokenizer.encode(problem.answer) + (0,)])
            labels = ids.clone()
            labels[:, : len(prompt)] = -100
            with torch.no_grad():
                losses.append(float(model(ids, labels=labels).loss))
        return sum(losses) / len(losses)

    assert loss(20) < 0.75 * loss(1)


@pytest.mark.parametrize(("width", "heads"), [(128, 3), (30, 2), (64, 64)])
def test_a_width_that_heads_cannot_share(width, heads):
    with pytest.raises(ConfigError, match="even size"):
        architecture(config(width=width, heads=heads))
