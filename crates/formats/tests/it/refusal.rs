//! What a refusal must be.

/// The refusal of `result`, which is one readable line and mentions `about`.
#[track_caller]
pub(crate) fn refused<T>(result: formats::Result<T>, about: &str) {
    let line = match result {
        Ok(_) => panic!("accepted; expected a refusal about {about}"),
        Err(error) => error.to_string(),
    };
    assert!(line.contains(about), "{line} does not mention {about}");
    assert!(!line.contains('\n') && line.len() < 1_000, "not one line: {line}");
}
