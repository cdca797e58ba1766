//! The messages of gpt-oss: an answer is several of them, each on a channel, between control tokens.
//!
//! `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>`, where the prompt ends
//! with `<|start|>assistant`. The channel `analysis` is reasoning, `final` the answer, `commentary` text for the user or,
//! with the recipient `functions.NAME` in the header, the arguments of a call, which `<|call|>` ends.

use super::Delta;
use text::{CheckpointText, Token};

/// A control token of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A header begins.
    Start,
    /// The name of the channel follows.
    Channel,
    /// The type of the message follows.
    Constrain,
    /// The header is over.
    Message,
    /// The message is over.
    End,
    /// The message is over; it is a call, and the answer ends.
    Call,
    /// The message is over, and the answer.
    Return,
}

/// Which tokens of a model are marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    ids: [Token; MARKS.len()],
}

const MARKS: [(&str, Mark); 7] = [
    (START, Mark::Start),
    (CHANNEL, Mark::Channel),
    ("<|constrain|>", Mark::Constrain),
    (MESSAGE, Mark::Message),
    ("<|end|>", Mark::End),
    ("<|call|>", Mark::Call),
    ("<|return|>", Mark::Return),
];
const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
/// What a message is that answers the user.
pub(crate) const FINAL: &str = "<|channel|>final<|message|>";
/// How reasoning begins after the prompt, and how it goes over to the answer.
pub(super) const THOUGHT: [&str; 2] =
    ["<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"];
/// What the recipient of a call begins with.
const FUNCTIONS: &str = "functions.";
/// Between two messages of a kind.
const GAP: &str = "\n\n";

impl Marks {
    /// The marks of a tokenizer, if it has all of them; `id_of` finds a token by its spelling.
    pub fn find(id_of: impl Fn(&str) -> Option<Token>) -> Option<Marks> {
        let mut ids = [0; MARKS.len()];
        for (id, (spelling, _)) in ids.iter_mut().zip(MARKS) {
            *id = id_of(spelling)?;
        }
        Some(Marks { ids })
    }

    /// The marks of a checkpoint whose chat template writes such messages.
    pub(super) fn of(text: &CheckpointText, rendered: &str) -> Option<Marks> {
        Self::in_use(|spelling| text.id_of(spelling), rendered)
    }

    /// The marks of a tokenizer, if a rendered chat has such messages.
    pub(super) fn in_use(id_of: impl Fn(&str) -> Option<Token>, rendered: &str) -> Option<Marks> {
        let writes = rendered.contains(START) && rendered.contains(MESSAGE);
        Marks::find(id_of).filter(|_| writes)
    }

    /// The mark that a token is.
    pub(super) fn mark(&self, token: Token) -> Option<Mark> {
        let at = self.ids.iter().position(|id| *id == token)?;
        Some(MARKS[at].1)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Answer,
    Call { empty: bool },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// After a message; what stands here belongs to none.
    Between,
    /// In a header: the role, and behind `channel` bytes the rest.
    Header {
        text: String,
        channel: Option<usize>,
    },
    Body(Kind),
}

/// Separates the messages of an answer.
#[derive(Clone, Debug)]
pub struct HarmonySplit {
    marks: Marks,
    /// Whether functions are offered.
    calls: bool,
    place: Place,
    /// Whether a message of the kind had text, so that the next one begins after a gap.
    reasoned: bool,
    answered: bool,
    /// The next text of the message is its first.
    fresh: bool,
    /// The answer has a mark.
    marked: bool,
}

impl HarmonySplit {
    /// For an answer to a prompt, whose end may be the start of a message. `calls`: functions are offered.
    pub fn new(marks: Marks, prompt: &str, calls: bool) -> Self {
        let place = Place::Header { text: String::new(), channel: None };
        let mut split = Self {
            marks,
            calls,
            place,
            reasoned: false,
            answered: false,
            fresh: true,
            marked: false,
        };
        let Some((_, last)) = prompt.rsplit_once(START) else { return split };
        let (header, body) = match last.split_once(MESSAGE) {
            Some((header, body)) => (header, Some(body)),
            None => (last, None),
        };
        let mut parts = header.splitn(2, CHANNEL);
        split.text(parts.next().unwrap_or(""), &mut Vec::new());
        if let Some(channel) = parts.next() {
            split.mark(Mark::Channel, &mut Vec::new());
            split.text(channel, &mut Vec::new());
        }
        match body {
            Some("") => _ = split.mark(Mark::Message, &mut Vec::new()),
            Some(_) => {
                // The answer continues a message, without a gap.
                split.mark(Mark::Message, &mut Vec::new());
                split.fresh = false;
            }
            None => {}
        }
        split.marked = false;
        split
    }

    /// The mark that a token is.
    pub(super) fn mark_of(&self, token: Token) -> Option<Mark> {
        self.marks.mark(token)
    }

    /// Whether the stream is inside reasoning.
    pub(super) fn reasons(&self) -> bool {
        self.place == Place::Body(Kind::Reasoning)
    }

    /// Whether the stream is in a message, not in a header or between two.
    pub(super) fn in_message(&self) -> bool {
        matches!(self.place, Place::Body(_))
    }

    /// Adds text; appends reasoning and arguments to `out` and returns text of the answer.
    pub fn text(&mut self, text: &str, out: &mut Vec<Delta>) -> String {
        if text.is_empty() {
            return String::new();
        }
        let kind = match &mut self.place {
            Place::Between => return String::new(),
            Place::Header { text: header, .. } => {
                header.push_str(text);
                return String::new();
            }
            Place::Body(kind) => kind,
        };
        let first = std::mem::take(&mut self.fresh);
        let with_gap = |had: bool| if first && had { format!("{GAP}{text}") } else { text.into() };
        match kind {
            Kind::Reasoning => {
                out.push(Delta::Reasoning(with_gap(std::mem::replace(&mut self.reasoned, true))));
                String::new()
            }
            Kind::Answer => with_gap(std::mem::replace(&mut self.answered, true)),
            Kind::Call { empty } => {
                *empty = false;
                out.push(Delta::ToolArguments(text.into()));
                String::new()
            }
        }
    }

    /// Adds a mark; true if it ends the answer.
    pub fn mark(&mut self, mark: Mark, out: &mut Vec<Delta>) -> bool {
        self.marked = true;
        match mark {
            Mark::Start => {
                self.close(out);
                self.place = Place::Header { text: String::new(), channel: None };
            }
            Mark::Channel | Mark::Constrain => {
                // A channel without a start: the role is left out.
                if !matches!(self.place, Place::Header { .. }) {
                    self.close(out);
                    self.place = Place::Header { text: String::new(), channel: None };
                }
                if let Place::Header { text, channel } = &mut self.place {
                    text.push(' ');
                    if mark == Mark::Channel {
                        *channel = Some(text.len());
                    }
                }
            }
            Mark::Message => {
                if let Place::Header { text, channel } = &self.place {
                    let (kind, name) = self.kind(text, *channel);
                    out.extend(name.map(|name| Delta::ToolStart { name }));
                    (self.place, self.fresh) = (Place::Body(kind), true);
                }
            }
            Mark::End | Mark::Call | Mark::Return => self.close(out),
        }
        matches!(mark, Mark::Call | Mark::Return)
    }

    /// What a message with this header is, and the function of a call.
    fn kind(&self, header: &str, channel: Option<usize>) -> (Kind, Option<String>) {
        let recipient = header.split_whitespace().find_map(|word| word.strip_prefix("to="));
        let function = recipient.and_then(|to| to.strip_prefix(FUNCTIONS)).filter(|_| self.calls);
        if let Some(name) = function {
            return (Kind::Call { empty: true }, Some(name.into()));
        }
        let channel = channel.map_or("", |at| header[at..].split_whitespace().next().unwrap_or(""));
        (if channel == "analysis" { Kind::Reasoning } else { Kind::Answer }, None)
    }

    /// Ends the message, if there is one.
    fn close(&mut self, out: &mut Vec<Delta>) {
        if let Place::Body(Kind::Call { empty }) = self.place {
            if empty {
                out.push(Delta::ToolArguments("{}".into()));
            }
            out.push(Delta::ToolEnd);
        }
        self.place = Place::Between;
    }

    /// Ends the answer. Text that no mark follows is the answer of a model that writes no messages.
    pub fn flush(&mut self, out: &mut Vec<Delta>) -> String {
        let place = std::mem::replace(&mut self.place, Place::Between);
        match place {
            Place::Body(Kind::Call { .. }) => out.push(Delta::ToolEnd),
            Place::Header { text, .. } if !self.marked => {
                return text.strip_prefix(ROLE).map_or(text.clone(), Into::into);
            }
            Place::Header { .. } | Place::Body(_) | Place::Between => {}
        }
        String::new()
    }
}

/// The role in the header with which prompts end.
const ROLE: &str = "assistant";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PROMPT: &str = "<|start|>user<|message|>Hi<|end|><|start|>assistant";

    fn marks() -> Marks {
        Marks::find(|spelling| MARKS.iter().position(|mark| mark.0 == spelling).map(|i| i as u32))
            .unwrap()
    }

    /// Marks and text of an answer that is written out.
    fn events(answer: &str) -> Vec<Result<Mark, &str>> {
        let (mut events, mut rest) = (Vec::new(), answer);
        while !rest.is_empty() {
            let next = MARKS
                .iter()
                .filter_map(|mark| rest.find(mark.0).map(|at| (at, mark)))
                .min_by_key(|(at, _)| *at);
            let Some((at, (spelling, mark))) = next else {
                events.push(Err(rest));
                break;
            };
            if at > 0 {
                events.push(Err(&rest[..at]));
            }
            events.push(Ok(*mark));
            rest = &rest[at + spelling.len()..];
        }
        events
    }

    /// Reasoning, text and calls, with text in pieces of `size` characters; and whether a mark ended the answer.
    fn split(
        prompt: &str,
        answer: &str,
        calls: bool,
        size: usize,
    ) -> (String, String, Vec<String>, bool) {
        let mut split = HarmonySplit::new(marks(), prompt, calls);
        let (mut out, mut said, mut ended) = (Vec::new(), String::new(), false);
        for event in events(answer) {
            match event {
                Ok(mark) => {
                    ended = split.mark(mark, &mut out);
                    if ended {
                        break;
                    }
                }
                Err(text) => {
                    let chars: Vec<char> = text.chars().collect();
                    for piece in chars.chunks(size) {
                        said += &split.text(&piece.iter().collect::<String>(), &mut out);
                    }
                }
            }
        }
        said += &split.flush(&mut out);
        let (mut thought, mut made, mut open) = (String::new(), Vec::new(), false);
        for delta in out {
            match delta {
                Delta::Reasoning(text) => thought += &text,
                Delta::ToolStart { name } => {
                    assert!(!std::mem::replace(&mut open, true));
                    made.push(name + " ");
                }
                Delta::ToolArguments(text) => *made.last_mut().unwrap() += &text,
                Delta::ToolEnd => assert!(std::mem::take(&mut open)),
                Delta::Text(text) => panic!("{text}"),
            }
        }
        assert!(!open);
        (thought, said, made, ended)
    }

    fn found(
        thought: &str,
        said: &str,
        made: &[&str],
        ended: bool,
    ) -> (String, String, Vec<String>, bool) {
        let made = made.iter().map(|call| (*call).to_owned()).collect();
        (thought.into(), said.into(), made, ended)
    }

    #[test]
    fn channels_are_separated_for_any_piece_size() {
        let both = "<|channel|>analysis<|message|>Why? <b> é<|end|><|start|>assistant\
                    <|channel|>final<|message|>Because.<|return|>";
        let call = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary \
                    to=functions.f <|constrain|>json<|message|>{\"a\": \"é\"}<|call|>never";
        let role = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant \
                    to=functions.g<|channel|>commentary json<|message|><|call|>";
        for size in 1..20 {
            assert_eq!(split(PROMPT, both, true, size), found("Why? <b> é", "Because.", &[], true));
            assert_eq!(
                split(PROMPT, call, true, size),
                found("Look.", "", &["f {\"a\": \"é\"}"], true)
            );
            assert_eq!(split(PROMPT, role, true, size), found("", "I look.", &["g {}"], true));
            // Nobody offered a function.
            assert_eq!(
                split(PROMPT, call, false, size),
                found("Look.", "{\"a\": \"é\"}", &[], true)
            );
            let header = "<|channel|>analysis<|message|><|end|><|start|>assistant to=";
            assert_eq!(split(PROMPT, header, true, size), found("", "", &[], false));
            let cut = &call[..call.len() - 15];
            assert_eq!(split(PROMPT, cut, true, size).2, ["f {\"a\": \"é"]);
            assert_eq!(split(PROMPT, "Just text", true, size), found("", "Just text", &[], false));
        }
    }

    #[test]
    fn several_messages_of_a_channel_have_a_gap() {
        let two = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis\
                   <|message|>b<|end|>x<|start|>assistant<|channel|>commentary<|message|>c<|end|>\
                   <|channel|>final<|message|>d";
        assert_eq!(split(PROMPT, two, true, 1), found("a\n\nb", "c\n\nd", &[], false));
    }

    #[test]
    fn an_answer_may_begin_inside_a_message() {
        let final_message = format!("{PROMPT}{FINAL}");
        assert_eq!(split(&final_message, "{}<|return|>", true, 1), found("", "{}", &[], true));
        let some = format!("{PROMPT}{FINAL}Once");
        assert_eq!(split(&some, " more", true, 2), found("", " more", &[], false));
        let thought = format!("{PROMPT}{}", THOUGHT[0]);
        let rest = format!("hm{}yes", THOUGHT[1]);
        assert_eq!(split(&thought, &rest, true, 3), found("hm", "yes", &[], false));
        assert_eq!(split("", "text", true, 3), found("", "text", &[], false));
    }

    #[test]
    fn marks_are_found_by_their_spelling() {
        assert_eq!(marks().mark(4), Some(Mark::End));
        assert_eq!(marks().mark(7), None);
        assert_eq!(Marks::find(|spelling| (spelling != "<|call|>").then_some(1)), None);
    }

    proptest! {
        /// Any answer, in any pieces: the same as in one piece.
        #[test]
        fn pieces_change_nothing(
            parts in proptest::collection::vec(prop_oneof![
                (0..MARKS.len()).prop_map(|i| MARKS[i].0.to_owned()),
                prop::sample::select(&["analysis", "final", "commentary to=functions.f", "to="])
                    .prop_map(str::to_owned),
                "[a-zé {}\"=]{0,6}",
            ], 0..24),
            size in 1usize..6,
            calls: bool,
        ) {
            let answer = parts.concat();
            let whole = split(PROMPT, &answer, calls, usize::MAX);
            prop_assert_eq!(split(PROMPT, &answer, calls, size), whole);
        }
    }
}
