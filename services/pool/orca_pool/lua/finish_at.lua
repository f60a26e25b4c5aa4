-- Ends a request with the token at an index, because an endpoint found a stop string there. The smallest index stays.
--
-- KEYS: the pool hash.
-- ARGV: request id, index, reason, SHA-1 (hex) of the token ids 0..index, each as a little-endian u32.
-- Returns 'ok'; 'ahead' when the pool has fewer tokens or does not know the request, because Redis lost some: the endpoint
--   must wait until they were made again; 'other' when the pool has other tokens than the endpoint saw.
local id, final, reason, digest = ARGV[1], ARGV[2] + 1, ARGV[3], ARGV[4]
local key = REQUEST .. id
local state, final_now = fields(key, 'state', 'final')
if not state or final > committed(id) then
  return 'ahead'
end
if redis.sha1hex(ids_of(id, final)) ~= digest then
  return 'other'
end
if state ~= 'ended' then
  end_early(id, reason, final)
elseif final < tonumber(final_now) then
  call('HSET', key, 'final', final, 'reason', reason)
end
return 'ok'
