-- Agrees on the release's model. The first service sets it; every other is told what stands.
--
-- KEYS: the pool hash.
-- ARGV: digest of the model, max positions, vocabulary size.
-- Returns the digest that stands.
local digest, max_positions, vocab_size = unpack(ARGV)
if not call('HGET', POOL, 'digest') then
  call('HSET', POOL, 'digest', digest, 'max_positions', max_positions, 'vocab_size', vocab_size)
end
return call('HGET', POOL, 'digest')
