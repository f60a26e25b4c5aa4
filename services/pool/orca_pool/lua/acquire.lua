-- Takes an engine's lease when it still is what the candidate saw. An engine that is not known yet is made.
-- ARGV: engine, owner, then '' (it saw none) or '1', owner or '', term, counter as it saw them.
-- Returns the new term; nil when the lease moved.
local engine, owner = ARGV[1], ARGV[2]
local key = ENGINE .. engine
local g = call('HMGET', key, 'owner', 'term', 'counter')
if g[1] == owner then
  return tonumber(g[2]) -- sent twice
end
if ARGV[3] == '' then
  if (g[1] or '') ~= '' then
    return false
  end
elseif g[1] ~= ARGV[4] or g[2] ~= ARGV[5] or g[3] ~= ARGV[6] then
  return false
end
local term = number(g[2])
if not g[1] then
  -- Iteration numbers go on above those of a retired engine: it may have had this name.
  local reserved = call('HGET', POOL, 'reserved') or 0
  call('HSET', key, 'counter', 0, 'epoch', 0, 'reserved', reserved, 'last_claim', 0, 'slots', 0, 'tp', 0, 'pp', 0)
  call('SADD', ENGINES, engine)
end
call('HSET', key, 'owner', owner, 'term', int(term))
call('HINCRBY', key, 'counter', 1)
return term
