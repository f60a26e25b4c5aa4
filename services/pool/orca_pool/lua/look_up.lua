-- Tells how a request stands, for those who explain it. Changes nothing.
--
-- KEYS: the pool hash.
-- ARGV: request id.
-- Returns {state, position in the queue or 0, slots that it needs to begin, order, engine or '', committed
--   tokens, losses, reason or 0, submitted, claimed, first token, finished, now, engine that had its prefix or '', how many
--   have overtaken it as it waited for that}; nil when the request is not known.
local id = ARGV[1]
local request = named(REQUEST .. id, { 'state', 'upfront', 'order', 'engine', 'losses', 'reason', 'submitted',
  'claimed_at', 'first_token', 'finished', 'prefix_at', 'overtaken' })
if not request.state then
  return false
end
local position = request.state == 'waiting' and (call('ZRANK', WAITING, id) or -1) + 1 or 0
return { request.state, position, request.upfront, request.order, request.engine, committed(id), request.losses,
  request.reason, request.submitted, request.claimed_at, request.first_token, request.finished, int(now()),
  engine_of(request.prefix_at) or '', request.overtaken or '0' }
