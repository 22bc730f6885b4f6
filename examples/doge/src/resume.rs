//! What a training leaves to be taken up again.

use std::fs;
use std::path::Path;

use serde_json::Value;
use train_text::checkpoints;

use crate::error::Error;
use crate::train::Start;

/// What the training in a directory depends on.
const SETTINGS: &str = "settings.json";

/// Makes `dir` ready for a training that depends on these settings, and returns the number of its last checkpoint, if it
/// goes on from one. Without any it begins.
///
/// # Errors
///
/// [`Error::Settings`] if the training in `dir` depends on others, [`Error::Unusable`] if its settings are not JSON,
/// [`Error::Io`] if they cannot be read or written, or an earlier training cannot be removed.
pub fn begin(dir: &Path, settings: &Value, start: Start) -> Result<Option<usize>, Error> {
    let path = dir.join(SETTINGS);
    let text = format!("{settings:#}");
    if start == Start::Checkpoint && path.exists() {
        let saved = fs::read_to_string(&path).map_err(Error::io(&path))?;
        let parse = |text: &str| -> Result<Value, Error> {
            let unusable = |error: serde_json::Error| Error::Unusable {
                path: path.clone(),
                reason: error.to_string(),
            };
            serde_json::from_str(text).map_err(unusable)
        };
        // Both from text: a number that is read may differ from the one that was written in its last bit.
        if let Some((what, then, now)) = difference("", &parse(&saved)?, &parse(&text)?) {
            return Err(Error::Settings { what, then, now });
        }
        if let Some(last) = checkpoints::last(dir) {
            return Ok(Some(last));
        }
    }
    checkpoints::clear(dir)?;
    fs::write(&path, text).map_err(Error::io(&path))?;
    Ok(None)
}

/// The first thing that differs, by its path, and its two values.
fn difference(path: &str, then: &Value, now: &Value) -> Option<(String, String, String)> {
    let (Value::Object(old), Value::Object(new)) = (then, now) else {
        return (then != now).then(|| (path.to_owned(), then.to_string(), now.to_string()));
    };
    let names = old.keys().chain(new.keys());
    let mut differences = names.filter_map(|name| {
        let dot = if path.is_empty() { "" } else { "." };
        let of =
            |fields: &serde_json::Map<String, Value>| fields.get(name).cloned().unwrap_or_default();
        difference(&format!("{path}{dot}{name}"), &of(old), &of(new))
    });
    differences.next()
}

#[cfg(test)]
mod tests {
    use super::difference;
    use serde_json::json;

    #[test]
    fn what_differs_is_called_by_its_path() {
        let old = json!({"a": {"b": 1, "c": [1, 2]}, "d": 0.5});
        assert_eq!(difference("", &old, &old.clone()), None);
        let says = |new| difference("", &old, &new).map(|(path, then, now)| [path, then, now]);
        let strings = |texts: [&str; 3]| Some(texts.map(str::to_owned));
        let other = json!({"a": {"b": 1, "c": [1, 3]}, "d": 0.5});
        assert_eq!(says(other), strings(["a.c", "[1,2]", "[1,3]"]));
        let fewer = json!({"a": {"b": 1, "c": [1, 2]}});
        assert_eq!(says(fewer), strings(["d", "0.5", "null"]));
        let more = json!({"a": {"b": 1, "c": [1, 2], "e": "x"}, "d": 0.5});
        assert_eq!(says(more), strings(["a.e", "null", "\"x\""]));
    }
}
