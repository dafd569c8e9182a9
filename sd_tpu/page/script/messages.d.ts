// Made of sd_tpu/page/schema.py by `make script`: f0c8f28ceaf4d07b

export type Asked =
    | Plain
    | OfCard
    | Change
    | Around
    | Choose
    | Finish
    | Extend
    | OfTwoCards
    | Zip
    | OfPicture
    | Take
    | Read
    | Paint
    | Compare
    | Journey
    | Movie
    | Show
    | Watch
    | Look
    | Styles
    | ChooseModel
    | Link
    | OfHistory
    | Teach;

/**
 * An action that needs nothing else.
 */
export interface Plain {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "generate" | "stop" | "known" | "grid" | "about" | "way";
}
/**
 * Texts that are filled in, `overrides` each box's by name, and which cards are kept.
 */
export interface Form {
    /**
     * @maxItems 8
     */
    prompts: string[];
    seed: string;
    settings: {
        [k: string]: string;
    };
    /**
     * @maxItems 8
     */
    overrides: {
        [k: string]: string;
    }[];
    /**
     * @maxItems 8
     */
    keep: boolean[];
}
/**
 * An action on one card.
 */
export interface OfCard {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "vary" | "larger" | "redraw" | "live";
    index: number;
}
/**
 * Draw the pictures of cards anew, changed as words say.
 */
export interface Change {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "change";
    /**
     * @minItems 1
     * @maxItems 8
     */
    indices: number[];
    words: string;
    strength: number;
}
/**
 * Draw new pictures from those of cards, with other seeds.
 */
export interface Around {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "around";
    /**
     * @minItems 1
     * @maxItems 8
     */
    indices: number[];
    strength: number;
}
/**
 * Take a variant into its card; without a number, take all of them away.
 */
export interface Choose {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "choose";
    index: number;
    variant: number | null;
}
/**
 * Draw the drafts of cards again, finely and from the same noise.
 */
export interface Finish {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "finish";
    /**
     * @minItems 1
     * @maxItems 8
     */
    indices: number[];
}
/**
 * Draw what lies beside a card's picture: pixels to the left, above, to the right, below.
 */
export interface Extend {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "extend";
    index: number;
    /**
     * @minItems 4
     * @maxItems 4
     */
    sides: number[];
}
/**
 * Say what sets the pictures of two cards apart, or have the cards change places.
 */
export interface OfTwoCards {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "beside" | "swap";
    index: number;
    to: number;
}
/**
 * Pack the pictures of cards, or of all.
 */
export interface Zip {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "zip";
    indices?: number[] | null;
}
/**
 * An action on the picture of a card or, by its name, of the history.
 */
export interface OfPicture {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "again" | "before" | "large";
    index?: number | null;
    id?: string | null;
}
/**
 * Use a picture as a start, control or reference picture, or as a mask.
 */
export interface Take {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "take";
    index?: number | null;
    id?: string | null;
    file?: string | null;
    or_read?: boolean;
    mask_of?: string | null;
}
/**
 * Read the settings of an uploaded picture.
 */
export interface Read {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "read";
    file: string;
}
/**
 * Look at a start picture to paint a mask on it.
 */
export interface Paint {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "paint";
    input: string;
}
/**
 * Draw the first prompt with several values of one setting.
 */
export interface Compare {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "compare";
    what: string;
    values: string | string[];
}
/**
 * Draw the way from a card's picture to another's, or to another seed.
 */
export interface Journey {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "journey";
    index: number;
    to: number | null;
    count: number;
}
/**
 * Look at the last journey, or download it.
 */
export interface Movie {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "movie";
    kind?: string | null;
}
/**
 * Show a former run, or the browser's last one.
 */
export interface Show {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "show";
    shown?: string | null;
}
/**
 * Follow a run, from a version on; with `before`, its end is not announced again.
 */
export interface Watch {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "watch";
    seen: number;
    before: boolean;
}
/**
 * Check what is filled in; a page that is `fresh` also asks for the models.
 *
 * The answer says how long a change of the pictures at `indices` takes.
 */
export interface Look {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "look";
    fresh?: boolean;
    /**
     * @maxItems 8
     */
    indices?: number[];
    strength?: number;
}
/**
 * List the styles, with pictures of those that are not `seen` yet.
 */
export interface Styles {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "styles";
    /**
     * @maxItems 100000
     */
    seen: string[];
}
/**
 * Fill in the settings that a model brings along.
 */
export interface ChooseModel {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "model";
    model: string;
}
/**
 * Fill in what a link describes.
 */
export interface Link {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "link";
    link: string;
}
/**
 * Show the history after one of its buttons.
 */
export interface OfHistory {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "history";
    act:
        | "show"
        | "more"
        | "only"
        | "view"
        | "save"
        | "run"
        | "favourite"
        | "delete"
        | "clear"
        | "restore"
        | "board"
        | "boards"
        | "make"
        | "rename"
        | "unmake"
        | "put"
        | "take_off";
    pages?: number;
    favourites?: boolean;
    words?: string;
    board?: string;
    name?: string;
    /**
     * @maxItems 100000
     */
    ids?: string[];
    id?: string | null;
    to?: string | null;
}
/**
 * Something about teaching a LoRA, or about a run of it.
 */
export interface Teach {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "teach";
    act: "show" | "add" | "check" | "start" | "stop" | "resume" | "keep" | "discard";
    file?: string;
    name?: string;
    kind?: "thing" | "person" | "style";
    steps?: string;
    rank?: string;
    side?: string;
    /**
     * @maxItems 40
     */
    pictures?: Example[];
    count?: number | null;
    id?: string;
    step?: number;
    seen?: {
        [k: string]: string;
    };
}
/**
 * A picture to teach by, which has been uploaded, and its caption.
 */
export interface Example {
    file: string;
    name: string;
    text: string;
}
