//! JSON that passes through: kept as text, never as a tree, since nobody here looks inside it.

use std::{collections::BTreeMap, fmt, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::value::{RawValue, Value};

/// One valid JSON value as compact text. Cheap to clone. `Debug` shows its size only: payloads
/// and results never reach a log line.
#[derive(Clone, PartialEq, Eq)]
pub struct Json(Arc<str>);

impl Json {
    /// Checks the text and drops insignificant white space, so that equal content has equal bytes.
    /// The order of an object's keys is kept.
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        let raw: &RawValue = serde_json::from_str(text)?;
        Ok(Self(compact(raw.get()).into()))
    }

    pub fn from_value(value: &Value) -> Self {
        Self(value.to_string().into())
    }

    pub fn of<T: Serialize>(value: &T) -> Result<Self, serde_json::Error> {
        serde_json::to_string(value).map(|text| Self(text.into()))
    }

    pub fn null() -> Self {
        Self("null".into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn to_value(&self) -> Value {
        serde_json::from_str(&self.0).expect("checked when it was made")
    }

    pub fn decode<'a, T: Deserialize<'a>>(&'a self) -> Result<T, serde_json::Error> {
        serde_json::from_str(&self.0)
    }

    /// A short hash of the sorted key paths with their types: the *shape* of this content. Arrays
    /// count by their elements' shapes, and an object with more than 32 keys is folded as a map.
    pub fn shape(&self) -> String {
        let mut paths = std::collections::BTreeSet::new();
        shape_of(&self.to_value(), "$", 0, &mut paths);
        let text = paths.into_iter().collect::<Vec<_>>().join("\n");
        crate::codec::digest(text.as_bytes())[..6].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Removes white space outside strings from text that is known to be JSON.
fn compact(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut in_string, mut escaped) = (false, false);
    for c in text.chars() {
        if in_string {
            in_string = escaped || c != '"';
            escaped = c == '\\' && !escaped;
        } else if c.is_ascii_whitespace() {
            continue;
        } else {
            in_string = c == '"';
        }
        out.push(c);
    }
    out
}

const FOLD_KEYS: usize = 32;
const SHAPE_DEPTH: usize = 16;

fn shape_of(value: &Value, path: &str, depth: usize, paths: &mut std::collections::BTreeSet<String>) {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    paths.insert(format!("{path}:{kind}"));
    if depth == SHAPE_DEPTH {
        return;
    }
    match value {
        Value::Array(items) => {
            items.iter().for_each(|item| shape_of(item, &format!("{path}[]"), depth + 1, paths));
        }
        Value::Object(map) => {
            let sorted: BTreeMap<_, _> = map.iter().collect();
            let folded = sorted.len() > FOLD_KEYS;
            for (key, item) in sorted {
                let key = if folded { "*" } else { key.as_str() };
                shape_of(item, &format!("{path}.{key}"), depth + 1, paths);
            }
        }
        _ => {}
    }
}

/// Drops every `null` member of objects down to `depth`, so that what is absent is not shown.
/// Content below that depth is a user's and stays as it is.
pub fn without_nulls(value: &mut Value, depth: usize) {
    if let Value::Object(map) = value {
        map.retain(|_, item| !item.is_null());
        if depth > 0 {
            map.values_mut().for_each(|item| without_nulls(item, depth - 1));
        }
    }
}

impl From<Value> for Json {
    fn from(value: Value) -> Self {
        Self::from_value(&value)
    }
}

impl fmt::Debug for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "json of {} bytes", self.0.len())
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            let raw: &RawValue = serde_json::from_str(&self.0).map_err(serde::ser::Error::custom)?;
            raw.serialize(serializer)
        } else {
            serializer.serialize_str(&self.0)
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            let raw = Box::<RawValue>::deserialize(deserializer)?;
            Ok(Self(compact(raw.get()).into()))
        } else {
            let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
            Self::parse(&text).map_err(de::Error::custom)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compact_keeps_what_strings_hold() {
        let json = Json::parse(" { \"a b\" : [ 1 , \"x \\\" y\" ] } ").unwrap();
        assert_eq!(json.as_str(), r#"{"a b":[1,"x \" y"]}"#);
        assert!(Json::parse("{").is_err());
        assert!(Json::parse("1 2").is_err());
    }

    #[test]
    fn shape_depends_on_keys_and_types_alone() {
        let shape = |text: &str| Json::parse(text).unwrap().shape();
        assert_eq!(shape(r#"{"a":1,"b":["x"]}"#), shape(r#"{"b":["y","z"],"a":7}"#));
        assert_ne!(shape(r#"{"a":1}"#), shape(r#"{"a":"1"}"#));
        let map = |from: u32| {
            let keys: Vec<_> = (from..from + 40).map(|i| format!("\"k{i}\":1")).collect();
            shape(&format!("{{{}}}", keys.join(",")))
        };
        assert_eq!(map(0), map(100), "a map-like object is folded");
    }
}
