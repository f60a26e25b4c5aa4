-- Appends the tokens of an iteration, records ends, and writes one delivery entry per endpoint concerned.
-- ARGV: engine, owner, term, then per row: id, claim, base index, reason of its end or '', tokens (16 bytes each).
-- Returns per row -1 (ok), -2 (gone: ended or claimed elsewhere) or how many tokens the pool has; nil: an old term.
-- On the path of every iteration: three calls a row, and strings compared as they came.
local engine = ARGV[1]
if fenced(engine, ARGV[2], ARGV[3]) then
  return false
end
local answers, packets = {}, {}
for i = 4, #ARGV, 5 do
  local id, base, tokens = ARGV[i], tonumber(ARGV[i + 2]), ARGV[i + 4]
  local key = REQUEST .. id
  local r = call('HMGET', key, 'claim', 'engine', 'endpoint', 'attempt')
  local answer = -1
  if r[1] ~= ARGV[i + 1] or r[2] ~= engine then
    answer = -2
  elseif committed(id) ~= base then
    answer = committed(id)
  else
    local count, finish = #tokens / 16, ''
    if count > 0 then
      call('APPEND', TOKENS .. id, tokens)
      if base == 0 then
        call('HSET', key, 'first_token', int(now()))
      end
    end
    if ARGV[i + 3] ~= '' then
      finish = close(id, ARGV[i + 3], base + count)
    end
    local endpoint = r[3]
    if endpoint ~= '' then
      local list = packets[endpoint]
      if not list then
        list = {}
        packets[endpoint] = list
      end
      list[#list + 1] = packet(id, r[4], base, tokens, finish)
    end
  end
  answers[#answers + 1] = answer
end
for endpoint, list in pairs(packets) do
  deliver(endpoint, engine, table.concat(list))
end
return answers
