# /// script
# dependencies = ["pydantic[email]==2.14.4"]
# ///
"""Types of pydantic, each as the schema that OpenAI's client makes of it: one line of JSON, by name."""

import json
from collections import deque
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from ipaddress import IPv4Address, IPv6Network
from pathlib import Path
from re import Pattern
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

from pydantic import (
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ByteSize,
    ConfigDict,
    EmailStr,
    Field,
    HttpUrl,
    IPvAnyAddress,
    Json,
    JsonValue,
    PastDate,
    PositiveInt,
    SecretStr,
    StrictStr,
    create_model,
)
from typing_extensions import TypedDict


class Level(Enum):
    LOW = "low"
    HIGH = "high"


class Number(IntEnum):
    ONE = 1
    TWO = 2


class Pair(NamedTuple):
    left: int
    right: str


class Known(TypedDict, total=False):
    a: int


@dataclass
class Point:
    x: float
    y: float = 0.0


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Tree(BaseModel):
    value: str
    children: list["Tree"] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


TYPES: dict[str, Any] = {
    "str": str,
    "bounded str": Annotated[str, Field(min_length=2, max_length=5)],
    "pattern": Annotated[str, Field(pattern=r"^[A-Z]{2}\d+$")],
    "StrictStr": StrictStr,
    "int": int,
    "bounded int": Annotated[int, Field(ge=1, lt=100, multiple_of=3)],
    "PositiveInt": PositiveInt,
    "float": float,
    "Decimal": Decimal,
    "Decimal of 2 places": Annotated[Decimal, Field(max_digits=6, decimal_places=2)],
    "bool": bool,
    "None": None,
    "bytes": bytes,
    "Base64Bytes": Base64Bytes,
    "SecretStr": SecretStr,
    "EmailStr": EmailStr,
    "AnyUrl": AnyUrl,
    "HttpUrl": HttpUrl,
    "UUID": UUID,
    "Path": Path,
    "Pattern": Pattern,
    "IPv4Address": IPv4Address,
    "IPv6Network": IPv6Network,
    "IPvAnyAddress": IPvAnyAddress,
    "date": date,
    "PastDate": PastDate,
    "time": time,
    "datetime": datetime,
    "AwareDatetime": AwareDatetime,
    "timedelta": timedelta,
    "ByteSize": ByteSize,
    "complex": complex,
    "Fraction": Fraction,
    "Json": Json[list[int]],
    "JsonValue": JsonValue,
    "Any": Any,
    "Enum": Level,
    "IntEnum": Number,
    "Literal": Literal["a", 1, True],
    "optional": int | None,
    "union": int | str | list[float],
    "discriminated union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "list": list[int],
    "bounded list": Annotated[list[str], Field(min_length=1, max_length=3)],
    "set": set[int],
    "frozenset": frozenset[str],
    "deque": deque[int],
    "tuple": tuple[int, str],
    "tuple of any length": tuple[int, ...],
    "dict": dict[str, int],
    "dict of ints": dict[int, str],
    "dict of an Enum": dict[Level, int],
    "NamedTuple": Pair,
    "TypedDict": Known,
    "dataclass": Point,
    "closed model": Closed,
    "open model": Open,
    "itself inside": Tree,
}

made = {name: create_model("Given", value=(one, ...)).model_json_schema() for name, one in TYPES.items()}
print(json.dumps(made))
