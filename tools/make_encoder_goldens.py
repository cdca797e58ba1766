#!/usr/bin/env python3
"""Makes tiny random encoders, embedders and classifiers of every family, with the vectors and scores that `transformers`
computes for them (CPU, float32), under crates/model/tests/encoders/.

    python -m venv .venv && .venv/bin/pip install torch transformers safetensors
    .venv/bin/python tools/make_encoder_goldens.py [CASE...]

Each case is a folder: config.json, model.safetensors, for embedders modules.json and what it names, and golden.safetensors
with texts of several lengths: `tokens` (u32, one text after the other), `kinds` of tokens (u32), `lengths` (u32), and
`vectors` (texts × width, float32). Each text is computed alone, so nothing depends on padding. Seeds are fixed, so a rerun
gives the same files.
"""

import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig, BertForSequenceClassification, BertModel, ModernBertConfig, ModernBertForSequenceClassification,
    ModernBertModel, NomicBertConfig, NomicBertModel, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification,
    Qwen3Model, RobertaConfig, RobertaForSequenceClassification, XLMRobertaConfig, XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

OUT = pathlib.Path(__file__).resolve().parent.parent / "crates/model/tests/encoders"
BASE = dict(vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=80, pad_token_id=0)
ROBERTA = dict(BASE, type_vocab_size=1, pad_token_id=1, max_position_embeddings=82, layer_norm_eps=1e-5)
QWEN3 = dict(BASE, num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-6, tie_word_embeddings=True)
LENGTHS = (1, 5, 33, 2, 40, 17)

# Name: configuration, model, its arguments, how its vectors are made.
CASES = {
    "bert": (BertConfig, BertModel, BASE, "mean unit"),
    "bert-first": (BertConfig, BertModel, dict(BASE, hidden_act="gelu_new"), "first"),
    "bert-classes": (BertConfig, BertForSequenceClassification, dict(BASE, num_labels=3), "classes"),
    "bert-score": (BertConfig, BertForSequenceClassification, dict(BASE, num_labels=1), "classes"),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel, ROBERTA, "first unit"),
    "xlm-roberta-score": (XLMRobertaConfig, XLMRobertaForSequenceClassification, dict(ROBERTA, num_labels=1), "classes"),
    "roberta-classes": (RobertaConfig, RobertaForSequenceClassification, dict(ROBERTA, num_labels=2), "classes"),
    "modernbert": (ModernBertConfig, ModernBertModel,
                   dict(BASE, num_hidden_layers=4, local_attention=8, global_attn_every_n_layers=3, eos_token_id=2,
                        bos_token_id=1, cls_token_id=1, sep_token_id=2), "mean unit"),
    "modernbert-classes": (ModernBertConfig, ModernBertForSequenceClassification,
                           dict(BASE, num_hidden_layers=3, local_attention=8, classifier_pooling="mean", num_labels=2,
                                eos_token_id=2, bos_token_id=1, cls_token_id=1, sep_token_id=2), "classes"),
    "nomic": (NomicBertConfig, NomicBertModel, BASE, "mean unit"),
    "qwen3-embedding": (Qwen3Config, Qwen3Model, QWEN3, "last unit"),
    "qwen3-mean": (Qwen3Config, Qwen3Model, QWEN3, "mean"),
    "qwen3-classes": (Qwen3Config, Qwen3ForSequenceClassification, dict(QWEN3, num_labels=3), "classes"),
    "qwen3-reranker": (Qwen3Config, Qwen3ForCausalLM, QWEN3, "tokens"),
}
# The tokens whose logits a reranker compares.
NO, YES = 7, 11


def texts(config, kinds):
    draw = torch.Generator().manual_seed(5)
    for length in LENGTHS:
        tokens = torch.randint(3, config.vocab_size, (1, length), generator=draw)
        second = torch.arange(length) >= length // 2
        yield tokens, (second.long()[None] if kinds else torch.zeros_like(tokens))


def pooled(model, how, tokens, kinds):
    arguments = dict(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    if getattr(model.config, "type_vocab_size", 1) > 1:
        arguments["token_type_ids"] = kinds
    made = model(**arguments)
    if how == "classes":
        return made.logits[0]
    if how == "tokens":
        return made.logits[0, -1, [NO, YES]]
    states = made.last_hidden_state[0]
    vector = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[how.split()[0]]
    return vector / vector.norm() if "unit" in how else vector


def write_modules(folder, how, width):
    if how == "classes":
        return
    kinds = ["Transformer", "LogitScore"] if how == "tokens" else ["Transformer", "Pooling"]
    kinds += ["Normalize"] if "unit" in how else []
    names = ["" if i == 0 else f"{i}_{kind}" for i, kind in enumerate(kinds)]
    modules = [dict(idx=i, name=str(i), path=name, type=f"sentence_transformers.models.{kind}")
               for i, (kind, name) in enumerate(zip(kinds, names))]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
    (folder / names[1]).mkdir()
    if how == "tokens":
        settings = dict(true_token_id=YES, false_token_id=NO)
    else:
        settings = dict(word_embedding_dimension=width, pooling_mode_cls_token=how.startswith("first"),
                        pooling_mode_mean_tokens=how.startswith("mean"), pooling_mode_max_tokens=False,
                        pooling_mode_mean_sqrt_len_tokens=False, pooling_mode_lasttoken=how.startswith("last"))
    (folder / names[1] / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def make(name):
    configure, build, arguments, how = CASES[name]
    torch.manual_seed(sum(name.encode()))
    config = configure(**arguments)
    config._attn_implementation = "eager"
    model = build(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            # Larger than the usual start, so that no layer is almost the identity.
            tensor.copy_(torch.randn_like(tensor) * (0.15 if tensor.dim() > 1 else 0.3) + (tensor.dim() == 1) * 0.5)
        kinds = getattr(config, "type_vocab_size", 1) > 1
        all_texts = list(texts(config, kinds))
        vectors = [pooled(model, how, *text).float() for text in all_texts]
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_modules(folder, how, config.hidden_size)
    join = lambda tensors: torch.cat([tensor[0] for tensor in tensors]).to(torch.uint32)
    save_file(dict(tokens=join([text[0] for text in all_texts]), kinds=join([text[1] for text in all_texts]),
                   lengths=torch.tensor(LENGTHS, dtype=torch.uint32), vectors=torch.stack(vectors).contiguous()),
              folder / "golden.safetensors")
    print(name, [round(float(x), 3) for x in vectors[1][:4]])


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case)
