-- Takes an engine's lease, if the lease is still as the candidate saw it. Makes an engine that is not known yet.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, then what the candidate saw: '' when the engine had no lease, or '1', owner ('' when free),
--   term, counter.
-- Returns the new term; nil when the lease has changed.
--
-- A candidate may see its own name: its release was forgotten with Redis's last second, or the answer to an earlier acquire
-- was lost. It then gets a new term too, because ranks may know the one that stands.
local engine, owner, saw_lease, saw_owner, saw_term, saw_counter = unpack(ARGV)
local owner_now, term_now, counter_now = lease(engine)
if owner_now == owner and tonumber(term_now) > (tonumber(saw_term) or 0) then
  return tonumber(term_now) -- this operation was sent twice
end
if saw_lease == '' then
  if (owner_now or '') ~= '' then
    return false
  end
elseif owner_now ~= saw_owner or term_now ~= saw_term or counter_now ~= saw_counter then
  return false
end
local term = number(term_now)
if not owner_now then
  -- An engine of this name may have been retired: iteration numbers go on above those it had reserved.
  local reserved = call('HGET', POOL, 'reserved') or 0
  call('HSET', ENGINE .. engine, 'epoch', 0, 'reserved', reserved, 'last_claim', 0, 'tp', 0, 'pp', 0,
    'free', 0, 'pace', 0, 'room_at', 0, 'weights', '', 'policy', '', 'role', '', 'finishing', 0, 'listeners', int(number(0)))
  call('ZADD', ENGINES, 0, engine)
end
call('HSET', ENGINE .. engine, 'rows', 0) -- it runs nothing before its ranks are known to stand
set_lease(engine, owner, int(term), (counter_now or 0) + 1)
return term
