//! The arithmetic of repetitions: a median, and how far the repetitions lie apart.

use std::fmt;

use serde::Serialize;

/// What several repetitions of one measurement say.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
    /// As they came.
    pub values: Vec<f64>,
}

impl Spread {
    /// None without a value.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().collect();
        let mut sorted = values.clone();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let upper = sorted[sorted.len() / 2];
        let lower = sorted[(sorted.len() - 1) / 2];
        Some(Self { median: f64::midpoint(lower, upper), min, max, values })
    }

    /// Repetition by repetition, `ours` over `theirs`: what disturbed the machine for a while
    /// disturbed both. None when they don't have as many repetitions.
    pub fn ratio(ours: &Self, theirs: &Self) -> Option<Self> {
        let same = ours.values.len() == theirs.values.len();
        let pairs = ours.values.iter().zip(&theirs.values);
        same.then(|| Self::of(pairs.map(|(ours, theirs)| ours / theirs)))?
    }
}

/// `median (min–max)`; the precision given is for values under ten.
impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |value: f64| match value.abs() {
            value if value >= 10_000.0 => format!("{:.1}k", value / 1e3),
            value if value >= 100.0 => format!("{value:.0}"),
            value if value >= 10.0 => format!("{value:.1}"),
            value => format!("{value:.2}"),
        };
        let text = match self.values.len() {
            1 => number(self.median),
            _ => format!("{} ({}–{})", number(self.median), number(self.min), number(self.max)),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread<const N: usize>(values: [f64; N]) -> Spread {
        Spread::of(values).unwrap()
    }

    #[test]
    fn the_median_of_an_even_count_lies_between_the_middle_two() {
        assert_eq!(spread([3.0, 1.0, 2.0]).median, 2.0);
        assert_eq!(spread([4.0, 1.0, 2.0, 3.0]).median, 2.5);
        assert_eq!(spread([7.0]).median, 7.0);
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn the_range_is_of_the_extremes_and_the_order_is_kept() {
        let spread = spread([3.0, -1.0, 2.0]);
        assert_eq!((spread.min, spread.max), (-1.0, 3.0));
        assert_eq!(spread.values, [3.0, -1.0, 2.0]);
    }

    #[test]
    fn a_ratio_pairs_the_repetitions() {
        // Both twice as slow the second time: no doubt about the ratio.
        let ratio = Spread::ratio(&spread([300.0, 150.0]), &spread([100.0, 50.0])).unwrap();
        assert_eq!((ratio.min, ratio.median, ratio.max), (3.0, 3.0, 3.0));
        assert_eq!(Spread::ratio(&spread([1.0]), &spread([1.0, 2.0])), None);
    }

    #[test]
    fn it_reads_as_a_median_and_its_range() {
        assert_eq!(spread([1.0, 2.0, 4.0]).to_string(), "2.00 (1.00–4.00)");
        assert_eq!(spread([31_234.0]).to_string(), "31.2k");
        assert_eq!(spread([312.4]).to_string(), "312");
    }
}
