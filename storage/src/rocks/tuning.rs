//! How RocksDB is set up. Where a value is not its default, the reason stands beside it.

use rocksdb::{BlockBasedOptions, Cache, DBCompressionType, DBRecoveryMode, Options};

use crate::schema::Table;

#[derive(Clone)]
pub struct Tuning {
    cache: Cache,
}

impl std::fmt::Debug for Tuning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tuning").finish_non_exhaustive()
    }
}

impl Tuning {
    pub fn new(cache_bytes: usize) -> Self {
        Self { cache: Cache::new_lru_cache(cache_bytes) }
    }

    pub fn database(&self, tables: &[Table]) -> Options {
        let mut options = Options::default();
        options.create_if_missing(true);
        options.create_missing_column_families(true);
        options.set_paranoid_checks(true);
        options.set_max_background_jobs(2);
        options.set_max_open_files(512);
        // Its own log: two small files, and no statistics that nobody reads.
        options.set_max_log_file_size(1 << 20);
        options.set_keep_log_file_num(2);
        options.set_stats_dump_period_sec(0);
        options.set_stats_persist_period_sec(0);
        // Recycled files and tolerant recovery exclude each other.
        options.set_recycle_log_file_num(0);
        if is_log(tables) {
            // A crash in the middle of a write leaves a torn end, which was acknowledged to nobody;
            // damage before it is an error.
            options.set_wal_recovery_mode(DBRecoveryMode::TolerateCorruptedTailRecords);
            options.set_db_write_buffer_size(32 << 20);
        } else {
            // Unsynced: after power loss anything may be missing, and what comes before the first
            // gap is the state. The log has the rest.
            options.set_wal_recovery_mode(DBRecoveryMode::PointInTime);
            options.set_db_write_buffer_size(48 << 20);
            options.set_max_total_wal_size(64 << 20);
        }
        // A rarely written family would pin old write-ahead files for ever, and after a crash one
        // family must not be ahead of another.
        options.set_atomic_flush(true);
        options
    }

    pub fn table(&self, table: Table) -> Options {
        let mut blocks = BlockBasedOptions::default();
        blocks.set_block_cache(&self.cache);
        blocks.set_cache_index_and_filter_blocks(true);
        blocks.set_pin_l0_filter_and_index_blocks_in_cache(true);
        if !matches!(table, Table::Log | Table::LogMeta | Table::Meta) {
            // Answers for ids that were never seen, such as that of every new message.
            blocks.set_bloom_filter(10.0, false);
        }
        let mut options = Options::default();
        options.set_block_based_table_factory(&blocks);
        options.set_write_buffer_size(16 << 20);
        options.set_max_write_buffer_number(3);
        options.set_compression_type(match table {
            // Read back soon or never, and dropped before it is old.
            Table::Log | Table::LogMeta => DBCompressionType::None,
            _ => DBCompressionType::Lz4,
        });
        options
    }
}

fn is_log(tables: &[Table]) -> bool {
    tables.contains(&Table::Log)
}
