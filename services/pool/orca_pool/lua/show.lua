-- Shows a request to a reader who listens to nothing. Changes nothing.
--
-- KEYS: the pool hash.
-- ARGV: request id.
-- Returns what `shown` of prelude.lua returns, for a call without tokens and without a place in the queue; nil when the
--   request is not known.
local id = ARGV[1]
local state, final, weights = fields(REQUEST .. id, 'state', 'final', 'weights')
if not state then
  return false
end
return shown(id, 0, '', state == 'ended' and tonumber(final) or committed(id), weights, 0)
