-- Attaches calls to known requests.
--
-- KEYS: the pool hash.
-- ARGV: for each call its request id, endpoint, attempt, how many tokens the call has, the last of them in its binary form
--   ('' for none), how many its client saw, SHA-1 (hex) of their ids or ''.
-- Returns for each call what `attach` of prelude.lua returns, or a number of REFUSAL, or the error of its record alone.
local function attach_known(id, endpoint, attempt, known, last, seen, digest)
  if not registered(endpoint) then
    return REFUSAL.UNREGISTERED
  end
  if call('EXISTS', REQUEST .. id) == 0 then
    return REFUSAL.UNKNOWN
  end
  return attach(id, endpoint, attempt, tonumber(known), last, tonumber(seen), digest)
end

return one_by_one(7, attach_known)
