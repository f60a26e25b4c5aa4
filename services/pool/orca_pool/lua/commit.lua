-- Commits what iterations made: appends its tokens, records the ends of requests, and writes one delivery entry for each
-- endpoint concerned.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, number of rows, then five for each row: request id, claim number, base (the index of its
--   first token), reason of the request's end or '', tokens in their binary form. Then three for each row whose request
--   asked for them: number of the row, tops of its tokens, logprobs of its prompt or ''.
-- Returns for each row COMMITTED.OK, COMMITTED.GONE, or how many tokens the pool has when that is not the base; nil
--   when the master has lost the lease, and nothing was changed.
--
-- This script runs for every iteration, so it makes only three calls a row and compares numbers as the text in which
-- they came.
local engine, owner, term = ARGV[1], ARGV[2], ARGV[3]
if fenced(engine, owner, term) then
  return false
end
local answers, packets, scores = {}, {}, {}
local last = 4 + 5 * ARGV[4]
for i = last + 1, #ARGV, 3 do
  scores[tonumber(ARGV[i])] = { ARGV[i + 1], ARGV[i + 2] }
end
for i = 5, last, 5 do
  local id, claim, base, reason, tokens = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4]
  local key = REQUEST .. id
  local claim_now, holder, endpoint, attempt = fields(key, 'claim', 'engine', 'endpoint', 'attempt')
  local answer = COMMITTED.OK
  if claim_now ~= claim or holder ~= engine then
    answer = COMMITTED.GONE
  elseif committed(id) ~= base then
    answer = committed(id)
  else
    local count, finish, scored = #tokens / TOKEN_SIZE, '', scores[#answers + 1]
    local tops = scored and scored[1] or ''
    if scored then
      if tops ~= '' then
        call('APPEND', TOPS .. id, tops)
      end
      if scored[2] ~= '' and base == 0 then
        call('SET', PROMPT .. id, scored[2])
      end
    end
    if count > 0 then
      call('APPEND', TOKENS .. id, tokens)
      if base == 0 then
        call('HSET', key, 'first_token', int(now()))
      end
    end
    if reason ~= '' then
      finish = end_record(id, reason, base + count)
    end
    if endpoint ~= '' then
      local list = packets[endpoint]
      if not list then
        list = {}
        packets[endpoint] = list
      end
      list[#list + 1] = packet(id, attempt, base, tokens, finish, tops)
    end
  end
  answers[#answers + 1] = answer
end
for endpoint, list in pairs(packets) do
  deliver(endpoint, engine, table.concat(list))
end
return answers
