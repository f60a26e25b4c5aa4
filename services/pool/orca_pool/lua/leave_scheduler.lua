-- Removes a scheduler that leaves. It has released its engines before.
--
-- KEYS: the pool hash.
-- ARGV: scheduler.
-- Returns nil.
call('ZREM', SCHEDULERS, ARGV[1])
