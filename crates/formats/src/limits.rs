//! Every cap on what a file may claim, in one place.
//!
//! A cap is set well above the largest published model that we know of and well below what would
//! hurt: with all of them at their maximum at once, parsing stays under 512 MB of memory.

/// Metadata plus tensor table of one GGUF file. A 256 k vocabulary with merges takes about 16 MiB.
pub(crate) const GGUF_HEADER_BYTES: u64 = 64 << 20;
/// Key-value pairs in one GGUF file. Real files have 20 to 60.
pub(crate) const GGUF_KEYS: u64 = 4_096;
/// Bytes in one GGUF key; the specification says 65 535, real keys stay under 100.
pub(crate) const GGUF_KEY_BYTES: u64 = 1_024;
/// Bytes in one GGUF string value. Chat templates, the longest, reach about 100 KiB.
pub(crate) const GGUF_STRING_BYTES: u64 = 4 << 20;
/// Elements in all arrays of one GGUF file together: a string element costs 24 bytes of memory for
/// 8 bytes of file, so this cap is what bounds memory.
pub(crate) const GGUF_ARRAY_ELEMENTS: u64 = 4 << 20;
/// Largest alignment of GGUF tensor data; the default is 32, and a huge page is the most that is useful.
pub(crate) const GGUF_ALIGNMENT: u64 = 2 << 20;
/// Files one split GGUF checkpoint may have.
pub(crate) const GGUF_SPLITS: u64 = 1_024;

/// JSON header of one safetensors file. A 1 000-tensor shard takes about 100 KiB.
pub(crate) const SAFETENSORS_HEADER_BYTES: u64 = 32 << 20;
/// The `model.safetensors.index.json` file: one line per tensor of the whole model.
pub(crate) const INDEX_BYTES: u64 = 32 << 20;
/// Files one sharded checkpoint may have. Real ones stay under 200.
pub(crate) const SHARDS: usize = 1_024;

/// Tensors in one checkpoint. The largest dense models have about 2 000, experts reach 100 k.
pub(crate) const TENSORS: u64 = 1 << 18;
/// Bytes in one tensor name.
pub(crate) const TENSOR_NAME_BYTES: u64 = 512;
/// Dimensions of one tensor; GGUF allows 4.
pub(crate) const TENSOR_DIMS: usize = 8;
/// Dimensions of one GGUF tensor.
pub(crate) const GGUF_TENSOR_DIMS: u32 = 4;

/// `config.json`, `generation_config.json` and `tokenizer_config.json`. The last may embed a chat
/// template and a thousand added tokens.
pub const CONFIG_BYTES: u64 = 8 << 20;
/// Modules that one list of `quantization_config` may name. The longest published name every router and
/// attention layer of a model, under 10 000.
pub(crate) const MODULE_NAMES: usize = 1 << 17;
/// Bytes of the regular expressions in one such list. Published lists have up to a hundred short ones.
pub(crate) const MODULE_PATTERN_BYTES: usize = 1 << 16;
/// Groups of modules and exceptions that one `quantization_config` may have. Published ones have under 100.
pub(crate) const MODULE_GROUPS: usize = 1_024;
/// Decoder layers; the deepest published dense decoder has 126.
pub const LAYERS: u64 = 1_024;
/// Width of any one matrix side named by a config (hidden, intermediate, heads × head size).
pub const WIDTH: u64 = 1 << 20;
/// Tokens in a vocabulary; the largest published has 262 144. Building a tokenizer holds each
/// token's text about four times.
pub const VOCAB: u64 = 1 << 20;
/// Kinds of tokens of an encoder; published ones have 1 or 2.
pub const TOKEN_TYPES: u64 = 16;
/// Base64 of a tokenizer's table of replacements; the usual one has 316 720 bytes.
pub(crate) const CHARSMAP_BYTES: usize = 1 << 22;
/// Labels of a classifier.
pub const LABELS: usize = 1 << 14;
/// Merges of a BPE vocabulary; Llama 3 has 280 147.
pub(crate) const MERGES: usize = 1 << 21;
/// Added tokens, control tokens included. Published vocabularies stay under 10 000; those of models
/// that speak have one for each sound, up to 65 536.
pub(crate) const ADDED_TOKENS: usize = 1 << 17;
/// Bytes in one added token. The longest published are runs of spaces, under 100.
pub(crate) const ADDED_TOKEN_BYTES: usize = 256;
/// Bytes in all added tokens together: finding them in a text takes about 30 bytes of memory for
/// each. Published ones stay under 1 MB.
pub(crate) const ADDED_BYTES: usize = 2 << 20;
/// Attention heads.
pub const HEADS: u64 = 4_096;
/// Elements of one attention head.
pub const HEAD_DIM: u64 = 1_024;
/// Experts of one layer; the largest published number is 512.
pub const EXPERTS: usize = 512;
/// Experts of one token; published models have up to 22.
pub const TOP_EXPERTS: usize = 32;
/// Longest context a config may name.
pub const POSITIONS: u64 = 1 << 30;
/// End-of-sequence ids a config may list.
pub const EOS_IDS: usize = 64;

/// `tokenizer.json`. The largest published is about 35 MB.
pub(crate) const TOKENIZER_BYTES: u64 = 64 << 20;
/// Bytes in one token's text. The longest published are runs of 128 spaces.
pub(crate) const TOKEN_BYTES: usize = 4_096;
/// Bytes in one SentencePiece token. Published ones stay under 100, and the merges behind a token
/// take time with the square of its length to find.
pub(crate) const PIECE_BYTES: usize = 256;
/// Bytes of the normaliser, pre-tokenizer, post-processor or decoder in `tokenizer.json`. The
/// longest published are a few KB.
pub(crate) const PIPELINE_BYTES: usize = 1 << 19;
/// Steps of a normaliser or pre-tokenizer. Published chains have up to 10.
pub(crate) const PIPELINE_STEPS: usize = 32;
/// Bytes in one regular expression of a tokenizer. The longest published has about 700.
pub(crate) const EXPRESSION_BYTES: usize = 4_096;
/// Memory of one compiled expression before it runs; Unicode classes are large.
pub(crate) const EXPRESSION_NFA: usize = 2 << 20;
/// Memory of one expression while it runs, for each thread that runs it.
pub(crate) const EXPRESSION_CACHE: usize = 4 << 20;
/// Bytes that expressions may read for each byte of a text. Published ones read each about twice.
pub(crate) const READS_PER_BYTE: usize = 64;
/// Bytes of text one call may tokenize: over a million tokens.
pub(crate) const ENCODE_BYTES: usize = 8 << 20;
/// Bytes that a normaliser may make of one byte of text: a ligature in U+FDFA becomes 11 times as
/// long.
pub(crate) const NORMALISED_GROWTH: usize = 16;
/// Bytes that a normaliser may make of one text.
pub(crate) const NORMALISED_BYTES: usize = 4 * ENCODE_BYTES;
/// Bytes after which a word is cut as soon as no merge can reach across.
pub(crate) const WORD_PIECE: usize = 4_096;
/// Bytes of a word that cannot be cut. Merging takes about 30 bytes of memory for each.
pub(crate) const WORD_BYTES: usize = 1 << 20;

/// Source of one chat template. The longest published is about 60 KB.
pub(crate) const TEMPLATE_BYTES: usize = 1 << 20;
/// Text one chat template may render: what one call may tokenize.
pub const RENDERED_BYTES: usize = 8 << 20;
/// Lines of a template, and bytes in one: the parser counts them in 16 bits.
pub(crate) const TEMPLATE_LINES: usize = 65_000;
/// Words of a template between the brackets of one tag: parsing one may take a stack frame for each.
pub(crate) const TEMPLATE_TAG_WORDS: usize = 8_192;
/// `elif`s of one template: parsing one takes a few stack frames. Published templates have under 50.
pub(crate) const TEMPLATE_ARMS: usize = 1_024;
/// Nesting of blocks and expressions in one template; a chain such as `a ~ b ~ c` counts as such.
pub(crate) const TEMPLATE_NESTING: usize = 256;
/// Stack to compile a template with: enough for the limits above.
pub(crate) const TEMPLATE_COMPILE_STACK: usize = 64 << 20;
/// Steps one rendering may take. The longest published templates take about 200 per message and
/// 1 000 per tool.
pub(crate) const TEMPLATE_STEPS: u64 = 3_000_000;
/// Bytes of text one rendering may read and write, in all.
pub(crate) const TEMPLATE_WORK: u64 = 2 << 30;
/// Memory of all values of one rendering together, the messages included.
pub(crate) const TEMPLATE_MEMORY: usize = 96 << 20;
/// Seconds one rendering may take, whatever the other limits allow.
pub(crate) const TEMPLATE_SECONDS: u64 = 3;
/// Nesting in one rendering: about 10 for each call of a macro. Schemas are rendered by recursive
/// macros, a few levels deep.
pub(crate) const TEMPLATE_DEPTH: usize = 1_500;
/// Stack to render with: enough for that depth.
pub(crate) const TEMPLATE_RENDER_STACK: usize = 32 << 20;
/// Numbers in one `range`, and rows of `batch` and `slice`.
pub(crate) const TEMPLATE_RANGE: usize = 100_000;
/// Arguments of one call in a template.
pub(crate) const TEMPLATE_ARGS: usize = 2_000;
/// Width of one value in a format such as `%8d`.
pub(crate) const FORMAT_WIDTH: usize = 4_096;
/// Nesting of messages and tools handed to a template.
pub(crate) const MESSAGE_DEPTH: usize = 64;
/// Nesting of values that a template makes.
pub(crate) const VALUE_DEPTH: usize = 128;
