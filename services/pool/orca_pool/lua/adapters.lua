-- Shows the adapters that are served beside the model.
--
-- KEYS: the pool hash.
-- ARGV: the version that the caller knows; an adapter's id, or ''.
-- Returns {version, ids and entries in turn (nothing where the caller knows the version), engines that have formed and what each
--   says of the adapter in turn: '+' and the fingerprint of its files, '-' and why it does not have it, or ''}.
local known, about = unpack(ARGV)
local version, of_engines = call('HGET', POOL, 'adapters') or '0', {}
if about ~= '' then
  for _, engine in ipairs(call('ZRANGE', ENGINES, 1, '+inf', 'BYSCORE')) do
    of_engines[#of_engines + 1] = engine
    of_engines[#of_engines + 1] = call('HGET', HAS .. engine, about) or ''
  end
end
return { version, version == known and {} or call('HGETALL', ADAPTERS), of_engines }
