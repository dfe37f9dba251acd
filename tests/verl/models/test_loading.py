from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import save_tiny_model, tiny_qwen2, tiny_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from agentgym_rl.errors import ConfigError
from verl.config import ModelConfig
from verl.models.loading import (
    check_output_layer,
    compute_dtype,
    export_huggingface,
    freeze,
    load_policy,
    load_tokenizer,
    model_skeleton,
    read_model,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_a_folder_gives_model_and_tokenizer(folder):
    model, tokenizer = load_policy(ModelConfig(path=str(folder)))
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tokenizer("user w1 <|im_end|>")["input_ids"] == tiny_tokenizer()("user w1 <|im_end|>")["input_ids"]


def test_a_word_level_tokenizer_beside_a_qwen2_keeps_its_words(folder):
    assert load_tokenizer(ModelConfig(path=str(folder)))("w1 w2 w3")["input_ids"] == [8, 9, 10]


def test_dtype_rules(folder):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert compute_dtype(ModelConfig(), cpu) == torch.float32
    assert compute_dtype(ModelConfig(), cuda) == torch.bfloat16
    assert compute_dtype(ModelConfig(dtype="float32"), cuda) == torch.float32
    model, _ = load_policy(ModelConfig(path=str(folder), dtype="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_folder_without_a_model_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path=.*nowhere"):
        load_policy(ModelConfig(path=str(tmp_path / "nowhere")))
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot load a causal language model"):
        load_policy(ModelConfig(path=str(tmp_path)))


def test_weights_that_are_cut_off_or_missing_are_a_configuration_error(tmp_path):
    save_tiny_model(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.path=.*: cannot load a causal language model: .*metadata"):
        load_policy(ModelConfig(path=str(tmp_path)))
    del weights["model.norm.weight"], weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"its files lack 2 weights, first 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_policy(ModelConfig(path=str(tmp_path)))


def test_models_that_change_their_logits_after_the_output_layer_are_refused():
    model = tiny_qwen2()
    check_output_layer(model)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match=r"final_logit_softcapping=30\.0"):
        check_output_layer(model)


def test_an_export_holds_everything_that_transformers_loads(tmp_path):
    model = tiny_qwen2(seed=3)
    model.generation_config = GenerationConfig(eos_token_id=1, temperature=0.6, do_sample=True)
    export_huggingface(tmp_path, model, tiny_tokenizer(), model.named_parameters())
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(10)[None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert again.generation_config.temperature == 0.6
    assert load_tokenizer(ModelConfig(path=str(tmp_path))).chat_template == tiny_tokenizer().chat_template


# --------------------------------------------------------------------------------------- external code, frozen weights


def test_an_external_library_is_imported_first_and_brings_its_architecture(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM\n"
        "class MyConfig(Qwen2Config):\n    model_type = 'my_qwen'\n"
        "class MyModel(Qwen2ForCausalLM):\n    config_class = MyConfig\n"
        "AutoConfig.register('my_qwen', MyConfig)\nAutoModelForCausalLM.register(MyConfig, MyModel)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    folder = save_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "my_qwen", "architectures": ["MyModel"]}))
    model, _ = load_policy(ModelConfig(path=str(folder), external_lib="my_models"))
    assert type(model).__name__ == "MyModel"


def test_an_external_library_that_is_not_there_is_named(tmp_path):
    config = ModelConfig(path=str(save_tiny_model(tmp_path)), external_lib="no_such_library")
    with pytest.raises(ConfigError, match=r"model\.external_lib='no_such_library': cannot be imported"):
        load_policy(config)


def test_frozen_weights_are_those_whose_names_match():
    model = tiny_qwen2()
    freeze(model, ["model.embed_tokens.*", "model.layers.0.*"])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if "embed_tokens" in name or ".layers.0." in name}


def test_a_pattern_that_freezes_nothing_or_everything_is_an_error():
    with pytest.raises(ConfigError, match=r"'layers\.0' matches no weight; names are such as model\.embed_tokens"):
        freeze(tiny_qwen2(), ["layers.0"])
    with pytest.raises(ConfigError, match="nothing is left to train"):
        freeze(tiny_qwen2(), ["*"])


def test_a_skeleton_has_the_models_structure_and_no_memory(tmp_path):
    config = ModelConfig(path=str(save_tiny_model(tmp_path)))
    skeleton, model = model_skeleton(config), read_model(config)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in skeleton.state_dict().items()}
    assert shapes == {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
