//! Costs: integer micro-units of the cluster's one unit, a decimal of up to six places in JSON.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Micro-units. Never negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Money(pub u64);

impl FromStr for Money {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const RULE: &str = "a cost must be a decimal of up to 6 places, not negative, below 10^12";
        let (whole, places) = text.split_once('.').unwrap_or((text, ""));
        let digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
        if whole.is_empty() || whole.len() > 12 || places.len() > 6 || !digits(whole) || !digits(places) {
            return Err(RULE);
        }
        let whole: u64 = whole.parse().map_err(|_| RULE)?;
        let micros: u64 = format!("{places:0<6}").parse().map_err(|_| RULE)?;
        Ok(Self(whole * 1_000_000 + micros))
    }
}

impl fmt::Display for Money {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000);
        f.pad(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

impl Serialize for Money {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            let number: serde_json::Number = self.to_string().parse().map_err(serde::ser::Error::custom)?;
            number.serialize(serializer)
        } else {
            serializer.serialize_u64(self.0)
        }
    }
}

impl<'de> Deserialize<'de> for Money {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            let number = f64::deserialize(deserializer)?;
            // A double holds 15 digits, so six places of anything below 10^9 come back exactly.
            let text = format!("{number:.6}");
            if text.parse() != Ok(number) {
                return Err(de::Error::custom("a cost has at most 6 places"));
            }
            text.parse().map_err(de::Error::custom)
        } else {
            u64::deserialize(deserializer).map(Self)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn money_is_exact_to_six_places() {
        for (text, micros) in [("0.21", 210_000), ("5", 5_000_000), ("0.000001", 1), ("12.5", 12_500_000)] {
            assert_eq!(text.parse(), Ok(Money(micros)));
            assert_eq!(Money(micros).to_string(), text);
            assert_eq!(serde_json::to_string(&Money(micros)).unwrap().parse::<f64>(), text.parse());
            assert_eq!(serde_json::from_str::<Money>(text).unwrap(), Money(micros));
        }
        for bad in ["-1", "1e3", "0.0000001", "", "1.2.3"] {
            assert!(bad.parse::<Money>().is_err(), "{bad}");
        }
    }
}
