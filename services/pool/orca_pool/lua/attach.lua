-- Attaches a call to a known request.
--
-- KEYS: the pool hash.
-- ARGV: request id, endpoint, attempt, how many tokens the call has, the last of them in its binary form ('' for none), how
--   many its client saw, SHA-1 (hex) of their ids or ''.
-- Returns what `attach` of prelude.lua returns, or a number of REFUSAL.
local id, endpoint, attempt, known, last, seen, digest = unpack(ARGV)
if not registered(endpoint) then
  return REFUSAL.UNREGISTERED
end
if call('EXISTS', REQUEST .. id) == 0 then
  return REFUSAL.UNKNOWN
end
return attach(id, endpoint, attempt, tonumber(known), last, tonumber(seen), digest)
