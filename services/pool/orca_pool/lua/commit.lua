-- Commits what iterations made: appends its tokens, records the ends of requests, and writes one delivery entry for each
-- endpoint concerned.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, the number of the engine's listeners that the master knows, number of rows, how many of them
--   are ready, number of ready packets, claim numbers of all rows (doubles), bases of all rows (the index of the first
--   token, i32). Then two for each row, the ready ones first: request id, tokens in their binary form. Then two for each
--   endpoint of the ready rows: endpoint, their packets. Then four for each row that has more to say: number of the row,
--   reason of the request's end or '', tops of its tokens, logprobs of its prompt or ''.
-- Returns {slots that the head of the queue needs or 0, number of the listeners before, and after, listeners of the last
--   rows (all but the ready ones, where their packets went out), then two for each row that is not COMMITTED.OK: number of
--   the row, and COMMITTED.GONE, or how many tokens the pool has when that is not the base}; nil when the master has lost
--   the lease, and nothing was changed.
--
-- This script runs for every iteration. While the listeners are those that the master knows, a ready row costs one APPEND,
-- whose answer tells whether the base was right, and its packet is passed on as it is. Otherwise, and when a base of a
-- ready row is wrong, all rows are taken one by one.
local engine, owner, term, known = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if fenced(engine, owner, term) then
  return false
end
local rows, ready, endpoints = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local bases = { struct.unpack('<' .. ('i4'):rep(rows), ARGV[9]) }
local IDS, ENDPOINTS_AT = 8, 9 + 2 * rows -- row r has its id at IDS + 2r, its tokens behind
local before = call('HGET', ENGINE .. engine, 'listeners') or ''
local packets, ended, more, pack = {}, {}, {}, struct.pack
local NOTHING = { reason = '', tops = '', prompt = '' } -- to say beside the tokens

-- Takes back tokens that were appended behind another base: `length` is what APPEND has answered. Returns how many tokens
-- the pool has.
local function take_back(key, tokens, length)
  local rest = length - #tokens
  if rest == 0 then
    call('DEL', key)
  else
    call('SET', key, call('GETRANGE', key, 0, rest - 1))
  end
  return rest / TOKEN_SIZE
end

-- Appends the tokens of all ready rows, or of none of them when a base is wrong. Returns whether it did.
local function append_ready()
  for row = 1, ready do
    local tokens = ARGV[IDS + 2 * row + 1]
    local length = call('APPEND', TOKENS .. ARGV[IDS + 2 * row], tokens)
    if length ~= bases[row] * TOKEN_SIZE + #tokens then
      take_back(TOKENS .. ARGV[IDS + 2 * row], tokens, length)
      for back = row - 1, 1, -1 do
        tokens = ARGV[IDS + 2 * back + 1]
        take_back(TOKENS .. ARGV[IDS + 2 * back], tokens, bases[back] * TOKEN_SIZE + #tokens)
      end
      return false
    end
  end
  return true
end

local first = 1 -- of the rows that are taken one by one
if before == known and append_ready() then
  first = ready + 1
  for i = ENDPOINTS_AT + 1, ENDPOINTS_AT + 2 * endpoints, 2 do
    packets[ARGV[i]] = { ARGV[i + 1] }
  end
end
local claims, listeners = {}, {}
if first <= rows then
  claims = { struct.unpack('<' .. ('d'):rep(rows), ARGV[8]) }
  for row = first, rows do
    claims[row] = int(claims[row])
  end
  listeners = call('HMGET', LISTENERS .. engine, unpack(claims, first, rows))
  for i = ENDPOINTS_AT + 2 * endpoints + 1, #ARGV, 4 do
    more[tonumber(ARGV[i])] = { reason = ARGV[i + 1], tops = ARGV[i + 2], prompt = ARGV[i + 3] }
  end
end
local answer = { 0, before, before, listeners }

for row = first, rows do
  local id, base, tokens, said = ARGV[IDS + 2 * row], bases[row], ARGV[IDS + 2 * row + 1], more[row] or NOTHING
  local listener, key, count = listeners[row - first + 1], TOKENS .. id, nil
  if ended[id] or (listener and said.reason ~= '' and call('EXISTS', REQUEST .. id) == 0) then
    listener = false -- Redis has evicted the record
  end
  if not listener then
    count = COMMITTED.GONE
  elseif tokens == '' then
    local length = call('STRLEN', key)
    count = length ~= base * TOKEN_SIZE and length / TOKEN_SIZE or nil
  else
    local length = call('APPEND', key, tokens)
    count = length ~= base * TOKEN_SIZE + #tokens and take_back(key, tokens, length) or nil
  end
  if count then
    answer[#answer + 1], answer[#answer + 2] = row, count
  else
    local finish, behind = '', ADDRESS_SIZE + #id
    if said.tops ~= '' then
      call('APPEND', TOPS .. id, said.tops)
    end
    if base == 0 and tokens ~= '' then
      call('HSET', REQUEST .. id, 'first_token', int(now()))
    end
    if base == 0 and said.prompt ~= '' then
      call('SET', PROMPT .. id, said.prompt)
    end
    if said.reason ~= '' then
      finish = end_record(id, said.reason, base + #tokens / TOKEN_SIZE)
      ended[id] = true
    end
    local endpoint = listener:sub(behind + 1)
    if endpoint ~= '' then
      local parts = packets[endpoint]
      if not parts then
        parts = {}
        packets[endpoint] = parts
      end
      local n = #parts
      parts[n + 1] = listener:sub(1, behind)
      parts[n + 2] = pack(CONTENT, base, #tokens / TOKEN_SIZE, #finish, #said.tops)
      parts[n + 3] = tokens
      if said ~= NOTHING then
        parts[n + 4], parts[n + 5] = finish, said.tops
      end
    end
  end
end
for endpoint, parts in pairs(packets) do
  deliver(endpoint, engine, table.concat(parts))
end
if next(ended) then
  answer[3] = call('HGET', ENGINE .. engine, 'listeners') or ''
end
answer[1] = unhinted_needs(engine)
return answer
