-- Returns claimed requests to the queue, each to its old place.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, then three for each request: id, claim number, and '1' when the request was RUNNING as the
--   engine lost its ranks.
-- Returns the moment at which it did; nil when the master has lost the lease, and nothing was changed.
--
-- A request that was RUNNING counts the loss. The count starts again when a token was committed since the last loss. One that was
-- handed over begins again: the engine that has its keys and values may let go of them.
local engine, owner, term = ARGV[1], ARGV[2], ARGV[3]
if fenced(engine, owner, term) then
  return false
end
local there, time = weights_there(), int(now())
for i = 4, #ARGV, 3 do
  local id, claim, lost = ARGV[i], ARGV[i + 1], ARGV[i + 2] == '1'
  local key = REQUEST .. id
  local claim_now, holder, order, losses, loss_at, max_tokens, upfront, weights, prefix_at, overtaken =
    fields(key, 'claim', 'engine', 'order', 'losses', 'loss_at', 'max_tokens', 'upfront', 'weights', 'prefix_at', 'overtaken')
  if claim_now == claim and holder == engine then
    losses = tonumber(losses)
    if lost then
      local count = committed(id)
      losses = count > tonumber(loss_at) and 1 or losses + 1
      call('HSET', key, 'losses', losses, 'loss_at', count)
    end
    if losses >= FATAL_LOSSES then
      end_early(id, REASON.INTERNAL, committed(id))
    else
      unclaim(id, claim, engine)
      let_go(id)
      enqueue(id, order)
      call('HSET', key, 'state', 'waiting', 'claim', '', 'engine', '', 'queued_at', time)
      local tied = tied_to(id, weights)
      hint_waiting(upfront, tied, awaited(prefix_at, overtaken, time))
      if hopeless(tied, max_tokens, there) then
        call('HSET', POOL, 'shrunk', 0) -- its engine may be gone meanwhile: the sweep looks at the queue again
      end
    end
  end
end
return time
