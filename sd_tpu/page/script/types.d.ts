// The types of what the script's modules share: elements, forms, requests, answers.

import type { Asked, Form, OfHistory } from "./messages";

export type { Asked, Form, OfHistory };

type Of<T, K extends keyof T> = Pick<T, K>;

/** An element of the page; which of these properties it has depends on its tag. */
export type Part = HTMLElement &
    Of<
        HTMLInputElement,
        | "value"
        | "checked"
        | "disabled"
        | "placeholder"
        | "max"
        | "name"
        | "type"
        | "files"
        | "selectionStart"
        | "selectionEnd"
        | "setRangeText"
        | "select"
    > &
    Of<HTMLSelectElement, "options" | "add"> &
    Of<HTMLDialogElement, "open" | "close" | "showModal"> &
    Of<HTMLImageElement, "src" | "alt" | "decode" | "naturalWidth" | "naturalHeight"> &
    Of<HTMLAnchorElement, "href" | "download"> &
    Of<HTMLTimeElement, "dateTime"> &
    Of<HTMLCanvasElement, "width" | "height"> & {
        getContext(kind: "2d"): CanvasRenderingContext2D;
    };

/** Settings of one box that differ from those for all, by name. */
export type Overrides = Record<string, string>;

/** How many pictures would be drawn, and in how many seconds if that is known. */
export interface Estimate {
    count: number;
    seconds: number | null;
}

/** `own` is what overrides were called, in forms that browsers have kept. */
export type FormPart = Partial<Form> & { sizes?: string[]; own?: Overrides[] };

/** What a message of an action has beside the fields of all messages. */
export type Fields<A, M = Asked> = M extends { do: infer D }
    ? A extends D
        ? Omit<M, "do" | "lang" | "browser" | "run" | "form">
        : never
    : never;

/** The same as an argument, which can be left out where all fields can. */
export type More<A> =
    Record<never, never> extends Fields<A> ? [more?: Fields<A>] : [more: Fields<A>];

/** An answer of the server: each action has some of these. */
export interface Answer {
    unreachable?: boolean; // the server did not answer
    message?: string; // a sentence for the progress line
    kind?: string; // of that sentence, its class
    news?: string; // a sentence that is only read aloud
    file?: string; // the address of a file to download
    form?: FormPart; // what to fill in instead of what is there
    filled?: FormPart; // what a run has filled in: prompts without their wildcards
    run?: string;
    seed?: number;
    remarks?: string[]; // HTML below each box
    summaries?: string[];
    faster?: string;
    slow?: string;
    draw?: Estimate; // what Draw would do now
    change?: number | null; // seconds of changing the selected pictures
    pace?: number | null; // seconds of eight pictures, as is filled in
    paces?: (number | null)[]; // and with the steps of each preset
    wrong?: boolean;
    line?: string;
    culprit?: { setting?: string; index: number | null } | null;
    inputs?: Record<string, string>;
    presets?: string[];
    sizes?: string[];
    samplers?: Record<string, string[]>;
    references?: number; // pictures that the chosen model takes
    models?: string[];
    input?: string; // the name of a picture that was handed in
    view?: string; // the address of a picture
    way?: string[]; // those of a journey, none where there is none yet
    before?: string;
    unit?: number; // pixels by which a picture can be extended
    apart?: string; // HTML of what sets two pictures apart
    history?: string;
    boards?: string; // HTML of them, for a picture
    board?: string; // that is shown in the history
    gone?: string[]; // the pictures of a board that is deleted
    styles?: string[]; // names, "" for none
    looks?: Record<string, string>; // pictures of styles that the page lacks
    more?: boolean; // whether others may come
    known?: string[];
    endings?: string[]; // what styles put behind prompts
    about?: string;
    words?: string; // what the name of a picture says
    captions?: string[]; // as they will be taught
    note?: string; // what is wrong with a training, or how long it takes
    ready?: boolean; // whether it can be started
    runs?: TrainingRun[];
}

/** A training, in HTML; what was drawn with it comes along where the browser has not seen it. */
export interface TrainingRun {
    id: string;
    status: string;
    actions: string;
    samples?: string;
    key: string;
}

/** What was filled in once, and the run whose pictures were there. */
export interface Snapshot {
    form: Form;
    run: string | null;
    drawn: boolean; // whether only the pictures were replaced
}

/** A text that completes a prompt, and the index at which it begins there. */
export type Suggestion = [from: number, text: string];

export interface Stroke {
    size: number;
    points: [number, number][];
}

/** The picture in the full-screen view. */
export interface Viewed {
    name: string; // of its figure
    all: string; // selects the figures around it
    id?: string; // of a picture of the history
    which: { id: string } | { index: number }; // the same for the server
}

export interface State {
    arrived: boolean;
    browser: string | null;
    overrides: Overrides[];
    keep: boolean[];
    selection: { indices: number[]; anchor: number };
    panelIndex: number;
    filling: boolean;
    edited: boolean;
    lastForm: Form | null;
    samples: number;
    undo: { past: Snapshot[]; future: Snapshot[]; focused: boolean };
    run: { name: string | null; seed: number | null; version: number };
    awaited: Extract<Asked, { do: "show" }> | null;
    turn: Promise<unknown>;
    changing: Promise<unknown>;
    pending: Map<Asked, boolean>;
    line: { running: string[]; busy: boolean; unseen: boolean };
    journey: boolean;
    look: { number: number; open: boolean; timer?: number; models: boolean; live: boolean };
    pauses: (number | undefined)[];
    inputs: Record<string, string>;
    references: number;
    incoming: Record<string, Promise<Answer>>;
    completion: {
        words: string[];
        since: number;
        box: Part | null;
        endings: string[];
        offered: Suggestion[];
        ghost: string; // what would go on from there, in grey
        chosen: number;
        cursor: string;
    };
    history: {
        deleted: { name: string; ids: string[] } | null;
        filter: { pages: number; favourites: boolean; words: string; board: string };
        number: number;
        timer?: number;
    };
    teach: {
        pictures: { file: string; name: string; text: string; url: string }[];
        timer?: number;
        number: number;
        watching?: number;
        seen: Record<string, string>;
    };
    viewed: Viewed | null;
    painter: { strokes: Stroke[]; inverted: boolean; index?: number; input?: string };
    pasted: { index: number; prompts: string[] } | null;
    away: {
        since: number | null;
        busy: boolean;
        checking: boolean;
        refused: number;
        timer?: number;
        finished: (string | null)[];
    };
    wake: { hiddenSince: number; timer?: number };
    focus: string | null;
}

export type Action = (data: Record<string, string | undefined>, button: Part) => unknown;

declare global {
    interface Window {
        sdTpuSettings: {
            boxes: number;
            seeds: number;
            sides: string[];
            offered: string[];
            uses: Record<string, string>;
        };
        sdTpu: {
            connect(ask: Hub["answer"], follow: Hub["stream"], send: Hub["upload"]): void;
            arrive(): Promise<void>;
            arrived?: boolean;
        };
    }
}

/** How Gradio's part of the page reaches the server. */
export interface Hub {
    answer(asked: Asked): Promise<Answer>;
    stream(asked: Asked): void;
    upload(file: File): Promise<{ path: string }>;
}
