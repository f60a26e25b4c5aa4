-- Commits what iterations made: appends its tokens, records the ends of requests, and writes one delivery entry for each
-- endpoint concerned.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, the number of the engine's listeners that the master knows, number of rows, how many of them
--   are ready, number of ready packets, claim numbers of all rows (doubles), bases of all rows but the ready ones (the index
--   of the first token, i32), the ready rows (wire.READY). Then two for each endpoint of the ready rows: endpoint, their
--   packets. Then two for each other row: request id, tokens in their binary form. Then six for each row that has more to
--   say: number of the row, reason of the request's end or '', tops of its tokens, logprobs of its prompt or '', how many of its
--   prompt's tokens were not computed (with token 0), and where its keys and values are, which hands it over, or ''.
-- Returns {slots that the head of the queue needs or 0, number of the listeners before, and after, listeners of the last
--   rows (all but the ready ones, where their packets went out), the moment at which requests ended or '', then two for each row that is not COMMITTED.OK: number of
--   the row, and COMMITTED.GONE, or how many tokens the pool has when that is not the base}; nil when the master has lost
--   the lease, and nothing was changed.
--
-- This script runs for every iteration. While the listeners are those that the master knows, a ready row costs one APPEND,
-- whose answer tells whether the base was right, and its packet is passed on as it is. Otherwise, and when a base of a
-- ready row is wrong, all rows are taken one by one. What only some commits need is below a `head` of its own.
local engine, owner, term, known = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if fenced(engine, owner, term) then
  return false
end
local rows, ready, endpoints = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local ENDPOINTS_AT = 10
local before = call('HGET', ENGINE .. engine, 'listeners') or ''
-- Three for each ready row: base, key of its tokens, tokens.
local given = ready > 0 and { struct.unpack('<' .. READY:rep(ready), ARGV[10]) } or {}

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
  for i = 1, 3 * ready, 3 do
    local base, key, tokens = given[i], given[i + 1], given[i + 2]
    local length = call('APPEND', key, tokens)
    if length ~= base * TOKEN_SIZE + #tokens then
      take_back(key, tokens, length)
      for back = i - 3, 1, -3 do
        base, key, tokens = given[back], given[back + 1], given[back + 2]
        take_back(key, tokens, base * TOKEN_SIZE + #tokens)
      end
      return false
    end
  end
  return true
end

local first = 1 -- of the rows that are taken one by one
if before == known and append_ready() then
  first = ready + 1
end
if first > rows then
  for i = ENDPOINTS_AT + 1, ENDPOINTS_AT + 2 * endpoints, 2 do
    deliver(ARGV[i], engine, ARGV[i + 1])
  end
  return { unhinted_needs(engine), before, before, {}, '' }
end
-- head

local OTHERS_AT, NOTHING = ENDPOINTS_AT + 2 * endpoints, { reason = '', tops = '', prompt = '', cached = '0', handed = '' }
local packets, ended, ending, more, handing, pack = {}, {}, {}, {}, {}, struct.pack
local bases, claims = { struct.unpack('<' .. ('i4'):rep(rows - ready), ARGV[9]) }, {}
for row, claim in ipairs({ struct.unpack('<' .. ('d'):rep(rows), ARGV[8]) }) do
  claims[row] = row >= first and int(claim)
end
local listeners = call('HMGET', LISTENERS .. engine, unpack(claims, first, rows))
if first > ready then
  for i = ENDPOINTS_AT + 1, ENDPOINTS_AT + 2 * endpoints, 2 do
    packets[ARGV[i]] = { ARGV[i + 1] }
  end
end
for i = OTHERS_AT + 2 * (rows - ready) + 1, #ARGV, 6 do
  more[tonumber(ARGV[i])] = { reason = ARGV[i + 1], tops = ARGV[i + 2], prompt = ARGV[i + 3], cached = ARGV[i + 4],
    handed = ARGV[i + 5] }
end
local answer = { 0, before, before, listeners, '' }

-- The id, base and tokens of a row.
local function content_of(row)
  if row <= ready then
    local at = 3 * row
    return given[at - 1]:sub(#TOKENS + 1), given[at - 2], given[at]
  end
  local at = OTHERS_AT + 2 * (row - ready)
  return ARGV[at - 1], bases[row - ready], ARGV[at]
end

-- Adds the packet of a row to those of its listener's endpoint.
local function add_packet(listener, id, base, tokens, finish, tops)
  local behind = ADDRESS_SIZE + #id
  local endpoint = listener:sub(behind + 1)
  if endpoint ~= '' then
    local parts = packets[endpoint]
    if not parts then
      parts = {}
      packets[endpoint] = parts
    end
    local n = #parts
    parts[n + 1] = listener:sub(1, behind)
    parts[n + 2] = pack(CONTENT, base, #tokens / TOKEN_SIZE, #finish, #tops)
    parts[n + 3], parts[n + 4], parts[n + 5] = tokens, finish, tops
  end
end

-- Whether an earlier commit of this row, whose answer was lost, has handed it over, and another engine may still pull it.
local function handed_before(id, row, said)
  local at, by = unpack(said.handed ~= '' and said.reason == '' and call('HMGET', REQUEST .. id, 'handed_at', 'handed_claim') or {})
  local before = by and by == claims[row] and at == place_at(engine)
  answer[5] = before and int(now()) or answer[5]
  return before
end

for row = first, rows do
  local id, base, tokens = content_of(row)
  local said, listener, key, count = more[row] or NOTHING, listeners[row - first + 1], TOKENS .. id, nil
  -- What is noted in a record that Redis has evicted would make another one, with nothing else in it.
  local noted = listener and (base == 0 or said.reason ~= '' or said.handed ~= '') and call('EXISTS', REQUEST .. id)
  if ended[id] or noted == 0 then
    listener = false
  end
  if not listener then
    count = not handed_before(id, row, said) and COMMITTED.GONE or nil
  elseif tokens == '' then
    local length = call('STRLEN', key)
    count = length ~= base * TOKEN_SIZE and length / TOKEN_SIZE or nil
  else
    local length = call('APPEND', key, tokens)
    count = length ~= base * TOKEN_SIZE + #tokens and take_back(key, tokens, length) or nil
  end
  if count then
    answer[#answer + 1], answer[#answer + 2] = row, count
  elseif listener then
    if said.tops ~= '' then
      call('APPEND', TOPS .. id, said.tops)
    end
    if base == 0 and tokens ~= '' then
      call('HSET', REQUEST .. id, 'first_token', int(now()))
      if said.cached ~= '0' then
        call('HSET', REQUEST .. id, 'cached', said.cached)
      end
    end
    if base == 0 and said.prompt ~= '' then
      call('SET', PROMPT .. id, said.prompt)
    end
    if said.reason ~= '' then
      ended[id], ending[#ending + 1] = true, row
    else
      add_packet(listener, id, base, tokens, '', said.tops)
      if said.handed ~= '' then
        handing[#handing + 1] = row
      end
    end
  end
end

-- Writes the packets. Returns the script's answer.
local function delivered()
  for endpoint, parts in pairs(packets) do
    deliver(endpoint, engine, table.concat(parts))
  end
  answer[1] = unhinted_needs(engine)
  return answer
end

if #ending + #handing == 0 then
  return delivered()
end
-- head

for _, row in ipairs(ending) do
  local id, base, tokens = content_of(row)
  local finish = end_record(id, more[row].reason, base + #tokens / TOKEN_SIZE)
  add_packet(listeners[row - first + 1], id, base, tokens, finish, more[row].tops)
end
for _, row in ipairs(handing) do
  local id, time = content_of(row), int(now())
  if not ended[id] then
    local order, upfront, weights = fields(REQUEST .. id, 'order', 'upfront', 'weights')
    unclaim(id, claims[row], engine)
    call('HSET', REQUEST .. id, 'state', 'handed', 'claim', '', 'engine', '', 'queued_at', time, 'handed_at', place_at(engine),
      'handed_claim', claims[row], 'handed', more[row].handed)
    call('ZADD', HANDED, order, id)
    hint_waiting(upfront, tied_to(id, weights), nil, true)
  end
end
answer[3] = call('HGET', ENGINE .. engine, 'listeners') or ''
answer[5] = int(now())
return delivered()
