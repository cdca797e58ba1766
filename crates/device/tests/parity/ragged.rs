//! Attention of steps whose rows differ much in length.

use crate::attention::{Row, check_varlen, mixed};

/// Decode rows beside prompts, two of them so much longer than the others that they are divided.
#[test]
fn attention_of_long_rows_beside_prompts() {
    for (seed, dim) in [(760, 64), (761, 128), (762, 128), (763, 64)] {
        let row = |at: usize| Row { q_len: 1, kv_len: 1 + 7 * at % 60 };
        let mut rows: Vec<Row> = (0..38).map(row).collect();
        rows[11].kv_len = 1000;
        rows[30].kv_len = 517;
        rows.push(Row { q_len: 17, kv_len: 300 });
        rows.push(Row { q_len: 90, kv_len: 90 });
        check_varlen(&mixed(seed, dim, rows));
    }
}
