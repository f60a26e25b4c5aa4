-- The pool's model: claimed by the first service, answered to every other.
-- ARGV: digest, max positions, vocabulary size. Returns the digest that stands.
if not call('HGET', POOL, 'digest') then
  call('HSET', POOL, 'digest', ARGV[1], 'max_positions', ARGV[2], 'vocab_size', ARGV[3])
end
return call('HGET', POOL, 'digest')
