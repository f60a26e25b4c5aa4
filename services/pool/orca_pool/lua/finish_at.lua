-- Ends a request with the token at `index`; the smallest index stays. ARGV: id, index, reason, SHA-1 (hex) of the ids
-- 0..index as u32-le. Returns 'ok', 'ahead' (fewer tokens here: the endpoint waits for the healing) or 'other'.
local id, final, reason = ARGV[1], ARGV[2] + 1, ARGV[3]
local key = REQUEST .. id
local r = call('HMGET', key, 'state', 'final')
if not r[1] or final > committed(id) then
  return 'ahead'
end
-- the first 4 of each 16 bytes
local ids = call('GETRANGE', TOKENS .. id, 0, final * 16 - 1):gsub('(....)............', '%1')
if redis.sha1hex(ids) ~= ARGV[4] then
  return 'other'
end
if r[1] ~= 'ended' then
  end_early(id, reason, final)
elseif final < tonumber(r[2]) then
  call('HSET', key, 'final', final, 'reason', reason)
end
return 'ok'
