-- The end of a scheduler. ARGV: scheduler.
call('ZREM', SCHEDULERS, ARGV[1])
