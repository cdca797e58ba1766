//! 200 questions with one right answer each: sums, and choices between two words.

/// A question, after two of its kind with their answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) text: String,
    answer: String,
}

impl Question {
    /// Whether the first word of an answer is the right one.
    pub(super) fn is_answered_by(&self, said: &str) -> bool {
        let word = said.trim_start().split(|c: char| !c.is_alphanumeric()).next();
        word.is_some_and(|word| word.eq_ignore_ascii_case(&self.answer))
    }
}

const ANIMALS: [&str; 25] = [
    "dog", "horse", "eagle", "salmon", "tiger", "rabbit", "whale", "spider", "cow", "snake",
    "mouse", "bear", "goat", "duck", "shark", "wolf", "monkey", "frog", "sheep", "lion", "camel",
    "pigeon", "beetle", "elephant", "fox",
];
const PLANTS: [&str; 25] = [
    "rose",
    "oak",
    "tulip",
    "fern",
    "cactus",
    "pine",
    "lily",
    "wheat",
    "maple",
    "ivy",
    "daisy",
    "bamboo",
    "willow",
    "moss",
    "orchid",
    "cedar",
    "sunflower",
    "barley",
    "clover",
    "birch",
    "palm",
    "mint",
    "basil",
    "lavender",
    "elm",
];

/// All of them, sums and choices in turn; the right choice is named first or last.
pub(super) fn questions() -> impl Iterator<Item = Question> {
    let animals = ANIMALS.map(|thing| (thing, "animal"));
    let plants = PLANTS.map(|thing| (thing, "plant"));
    let things = animals.into_iter().zip(plants).flat_map(|(animal, plant)| [animal, plant]);
    let orders = ["an animal or a plant", "a plant or an animal"];
    let choices =
        things.flat_map(move |(thing, answer)| orders.map(|order| choice(thing, order, answer)));
    (0..).map(sum).zip(choices).flat_map(|(sum, choice)| [sum, choice])
}

fn sum(index: u32) -> Question {
    let (a, b) = (2 + index * 7 % 19, 1 + index * 11 % 17);
    let text = format!("3 + 4 = 7\n10 + 5 = 15\n{a} + {b} =");
    Question { text, answer: (a + b).to_string() }
}

fn choice(thing: &str, order: &str, answer: &str) -> Question {
    let ask = |thing: &str| format!("Is {thing} {order}? Answer:");
    let [cat, grass, last] = [ask("a cat"), ask("grass"), ask(&format!("the {thing}"))];
    let text = format!("{cat} animal\n{grass} plant\n{last}");
    Question { text, answer: answer.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_200_different_questions() {
        let all: Vec<Question> = questions().collect();
        let texts: std::collections::BTreeSet<&str> = all.iter().map(|q| &q.text[..]).collect();
        assert_eq!((all.len(), texts.len()), (200, 200));
    }

    #[test]
    fn an_answer_is_its_first_word() {
        let question = questions().next().unwrap();
        assert_eq!(question.text, "3 + 4 = 7\n10 + 5 = 15\n2 + 1 =");
        assert!(question.is_answered_by(" 3\n4 + 4 = 8") && question.is_answered_by("3"));
        assert!(!question.is_answered_by(" 30") && !question.is_answered_by(""));
    }
}
