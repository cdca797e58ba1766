#!/usr/bin/env python3
"""Makes the reference data under crates/formats/tests/data with the reference packages.

    pip install gguf numpy tokenizers transformers jinja2 sentencepiece
    tools/formats_goldens.py quant
    tools/formats_goldens.py tiny
    tools/formats_goldens.py real --tokenizers FOLDER [--smollm2 FILE.gguf] [--gemma3 FILE.gguf]
    tools/formats_goldens.py templates [--templates FOLDER] [--ollama-utils FOLDER] [--xinference FOLDER]
                                       [--tokenizers FOLDER]
    tools/formats_goldens.py snippets

quant      random blocks of every quantised type, dequantised by `gguf`
tiny       small tokenizers of every kind, as tokenizer.json and as GGUF, with ids by `tokenizers`
real       hashes of the ids by `tokenizers` for 10,000 strings, for published tokenizers
           (FOLDER/NAME/models/tokenizer.json, as in the npm packages @lenml/tokenizer-NAME), and by
           `llama-cpp-python` for the vocabulary in a GGUF of Gemma 3
templates  the output of `transformers` for the templates of the data folder, after copying there: with
           --templates, those of CHOSEN from llama.cpp's models/templates (in the source package of PyPI
           `llama-cpp-python`); with --ollama-utils, those of OLLAMA from the unpacked npm package
           @huggingface/ollama-utils; with --xinference, those of XINFERENCE from the unpacked PyPI
           package. With --tokenizers, also for the templates of FETCHED, which tests fetch
           (FOLDER/NAME/models/tokenizer_config.json)
snippets   the output of `jinja2` for the small templates in snippets.json, set up as in `transformers`;
           null for an error

Strings come from a generator that crates/formats/tests/it/tokenizers.rs repeats step by step.
"""

import argparse
import json
import re
import struct
import tempfile
from datetime import datetime
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "crates/formats/tests/data"
MASK = (1 << 64) - 1


class Random:
    """splitmix64."""

    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def below(self, n):
        return self.next() % n


def strings(count, seed=1):
    """Texts of every kind: words, spaces, scripts, emoji, any code point, bytes that are not UTF-8."""
    pieces = [p.encode() for p in json.loads((DATA / "tokenizers/pieces.json").read_text())]
    random = Random(seed)
    for _ in range(count):
        out = bytearray()
        for _ in range(random.below(24)):
            which = random.below(len(pieces) + 6)
            if which < len(pieces):
                out += pieces[which]
            elif which < len(pieces) + 2:
                point = random.below(0x110000)
                out += chr(0xFFFD if 0xD800 <= point < 0xE000 else point).encode()
            elif which < len(pieces) + 3:
                out.append(random.below(256))
            else:
                for _ in range(1 + random.below(8)):
                    out.append(0x20 + random.below(0x5F))
        yield bytes(out).decode("utf-8", "replace")


def fnv(hash_, ids):
    """FNV-1a over the little-endian ids and their count."""
    for byte in struct.pack(f"<{len(ids) + 1}I", *ids, len(ids)):
        hash_ = ((hash_ ^ byte) * 0x100000001B3) & MASK
    return hash_


def quant():
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    out = DATA / "quant"
    out.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)
    # Byte offsets of the f16 factors of a block; the rest may be any bits.
    factors = {
        "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
        "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "F16": [], "BF16": [], "F32": [],
        "MXFP4": [],
    }
    for name, places in factors.items():
        kind = GGMLQuantizationType[name]
        elems, size = GGML_QUANT_SIZES[kind]
        count = 6 if elems > 1 else 128
        blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
        special = [6e-8, -6e-8, 65504.0, 0.0, -0.0]
        for place in places:
            values = random.normal(0, 0.05, count).astype(np.float16)
            values[: len(special)] = np.array(special, np.float16)[: count]
            blocks[:, place : place + 2] = random.permutation(values).view(np.uint8).reshape(count, 2)
        if name == "MXFP4":  # any exponent but 255, which is no number
            blocks[:, 0] = [0, 1, 2, 100, 127, 252]
        if elems == 1:  # every bit pattern but NaN, whose payload is not defined
            values = quants.dequantize(blocks, kind).reshape(-1)
            blocks[np.isnan(values)] = 0
        floats = quants.dequantize(blocks, kind).astype("<f4")
        assert np.isfinite(floats[2:]).any()
        (out / f"{name.lower()}.bin").write_bytes(blocks.tobytes() + floats.tobytes())


BYTE_LEVEL = {
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "smollm": None,
    "gpt-2": None,
}


def byte_level(pre):
    """An empty byte-level tokenizer with the pre-tokenizer of that GGUF name."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    level = lambda words: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    if BYTE_LEVEL[pre] is not None:
        split = pre_tokenizers.Split(Regex(BYTE_LEVEL[pre]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level(False)])
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level(True)])
    else:
        tokenizer.pre_tokenizer = level(True)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_gguf(path, model, pre, tokens, types, merges=None, scores=None):
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges:
        writer.add_token_merges(merges)
    if scores:
        writer.add_token_scores(scores)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def tiny():
    from tokenizers import pre_tokenizers, trainers

    out = DATA / "tokenizers"
    expected = {}
    corpus = list(strings(400, seed=2)) + ["the quick brown fox jumps over the lazy dog's back"] * 50
    for pre in BYTE_LEVEL:
        tokenizer = byte_level(pre)
        trainer = trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(corpus, trainer)
        tokenizer.add_tokens(["<think>", "</think>"])
        tokenizer.save(str(out / f"{pre}.json"), pretty=False)
        model = json.loads(tokenizer.to_str())["model"]
        vocab = tokenizer.get_vocab()
        tokens = sorted(vocab, key=vocab.get)
        types = [3 if vocab[t] < 3 else 4 if "think>" in t else 1 for t in tokens]
        merges = [" ".join(m) for m in model["merges"]]
        write_gguf(out / f"{pre}.gguf", "gpt2", pre, tokens, types, merges)
        expected[pre] = [tokenizer.encode(t, add_special_tokens=False).ids for t in strings(300, seed=3)]
    expected["llama"] = sentence_piece(out / "llama.gguf", corpus)
    (out / "expected.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n")


def sentence_piece(path, corpus):
    """A small SentencePiece BPE with the settings of Llama 2, encoded by SentencePiece itself."""
    import sentencepiece

    with tempfile.TemporaryDirectory() as folder:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([t.replace("\0", " ") for t in corpus if t.strip()]),
            model_prefix=f"{folder}/m", model_type="bpe", vocab_size=700, byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False,
            character_coverage=0.98, split_digits=True, minloglevel=2,
            allow_whitespace_only_pieces=True,
        )
        sp = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/m.model")
    size = sp.get_piece_size()
    kind = lambda i: 2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1
    tokens = [sp.id_to_piece(i) for i in range(size)]
    write_gguf(path, "llama", "default", tokens, [kind(i) for i in range(size)],
               scores=[sp.get_score(i) for i in range(size)])
    return [sp.encode(text) for text in strings(300, seed=3)]


def real(tokenizers_folder, smollm2, gemma3):
    from tokenizers import AddedToken, Tokenizer, models

    found = {}
    for name in ["qwen3", "llama3_2", "gpt2", "mistral_nemo", "gemma3"]:
        found[name] = Tokenizer.from_file(str(tokenizers_folder / name / "models/tokenizer.json"))
    if smollm2:
        from gguf import GGUFReader

        fields = GGUFReader(smollm2).fields
        get = lambda key: fields[f"tokenizer.ggml.{key}"].contents()
        tokens = get("tokens")
        tokenizer = byte_level("smollm")
        merges = [tuple(m.split(" ")) for m in get("merges")]
        tokenizer.model = models.BPE({t: i for i, t in enumerate(tokens)}, merges)
        control = [t for t, kind in zip(tokens, get("token_type")) if kind == 3]
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
        found["smollm2"] = tokenizer
    by_tokenizers = lambda tokenizer: lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    encoders = {name: by_tokenizers(tokenizer) for name, tokenizer in found.items()}
    if gemma3:
        from llama_cpp import Llama

        llama = Llama(str(gemma3), vocab_only=True, verbose=False)
        encoders["gemma3-270m"] = lambda text: llama.tokenize(text.encode(), add_bos=False, special=True)
    hashes = {}
    for name, encode in encoders.items():
        hashes[name] = []
        hash_ = 0xCBF29CE484222325
        for n, text in enumerate(strings(10_000), 1):
            hash_ = fnv(hash_, encode(text))
            if n % 500 == 0:
                hashes[name].append(f"{hash_:016x}")
                hash_ = 0xCBF29CE484222325
    (DATA / "tokenizers/real.json").write_text(json.dumps(hashes, indent=1) + "\n")


CHOSEN = """
ByteDance-Seed-OSS CohereForAI-c4ai-command-r-plus-tool_use
CohereForAI-c4ai-command-r7b-12-2024-tool_use GLM-4.6 HuggingFaceTB-SmolLM3-3B Kimi-K2-Instruct LFM2-8B-A1B MiMo-VL
Mistral-Small-3.2-24B-Instruct-2506 NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-QwQ-32B
Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B Qwen3-Coder deepseek-ai-DeepSeek-R1-Distill-Qwen-32B
deepseek-ai-DeepSeek-V3.1 ibm-granite-granite-3.3-2B-Instruct ibm-granite-granite-4.0
meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct microsoft-Phi-3.5-mini-instruct
mistralai-Mistral-Nemo-Instruct-2407 openai-gpt-oss-120b unsloth-mistral-Devstral-Small-2507
""".split()

# Templates that llama.cpp does not ship: our name, and the name in the package that does.
OLLAMA = {
    "CohereForAI-c4ai-command-r-08-2024": "library/command-r:35b",
    "allenai-OLMo-2-1124-7B-Instruct": "library/olmo2:7b",
}
XINFERENCE = {"THUDM-GLM-4-9B-0414": "glm4-0414"}
FETCHED = ["gemma3"]


def copy_templates(out, folder, ollama_utils, xinference):
    if folder:
        for name in CHOSEN:
            (out / f"{name}.jinja").write_bytes((folder / f"{name}.jinja").read_bytes())
    if ollama_utils:
        source = (ollama_utils / "src/chat-template-automap.ts").read_text()
        pairs = re.findall(r'^\s*model: "(.*)",\n\s*gguf: (".*"),$', source, re.MULTILINE)
        published = {name: json.loads(text) for name, text in pairs}
        for name, key in OLLAMA.items():
            (out / f"{name}.jinja").write_text(published[key])
    if xinference:
        for name, key in XINFERENCE.items():
            (model,) = json.loads((xinference / f"xinference/model/llm/models/{key}.json").read_text())
            (out / f"{name}.jinja").write_text(model["chat_template"])


def templates(arguments):
    from jinja2 import TemplateError
    from transformers.utils import chat_template_utils

    class Frozen(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 7, 26, 12, 34, 56)

    chat_template_utils.datetime = Frozen
    out = DATA / "templates"
    copy_templates(out, arguments.templates, arguments.ollama_utils, arguments.xinference)
    scenarios = json.loads((out / "scenarios.json").read_text())

    def rendered(source):
        compiled, texts = chat_template_utils._compile_jinja_template(source), {}
        for name, inputs in scenarios.items():
            variables = {"tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>", **inputs}
            try:
                text = compiled.render(**variables)
            except TemplateError as error:
                if type(error) is not TemplateError:
                    continue
                text = None  # the template raises, so Dacapo must refuse it too
            except TypeError:
                continue  # an error that only Python detects, which no template relies on
            texts[name] = text
        return texts

    def write(name, expected):
        (out / name).write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")

    write("expected.json", {path.stem: rendered(path.read_text()) for path in sorted(out.glob("*.jinja"))})
    if arguments.tokenizers:
        config = lambda name: json.loads((arguments.tokenizers / name / "models/tokenizer_config.json").read_text())
        write("fetched.json", {name: rendered(config(name)["chat_template"]) for name in FETCHED})


def snippets():
    """One expression or statement each; if `jinja2` raises, Dacapo must refuse it too."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise ValueError(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = datetime(2024, 7, 26, 12, 34, 56).strftime
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "a"}]
    path = DATA / "templates/snippets.json"
    made = []
    for source, _ in json.loads(path.read_text()):
        try:
            text = env.from_string(source).render(messages=messages)
        except Exception:
            text = None
        made.append([source, text])
    lines = ",\n".join(json.dumps(pair, ensure_ascii=False) for pair in made)
    path.write_text(f"[\n{lines}\n]\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["quant", "tiny", "real", "templates", "snippets"])
    parser.add_argument("--tokenizers", type=Path)
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--gemma3", type=Path)
    parser.add_argument("--templates", type=Path)
    parser.add_argument("--ollama-utils", type=Path)
    parser.add_argument("--xinference", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "quant":
        quant()
    elif arguments.what == "tiny":
        tiny()
    elif arguments.what == "real":
        real(arguments.tokenizers, arguments.smollm2, arguments.gemma3)
    elif arguments.what == "snippets":
        snippets()
    else:
        templates(arguments)


if __name__ == "__main__":
    main()
